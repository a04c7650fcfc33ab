"""Checks of a model, this host and the files of a run, before any process starts. Each raises ConfigError."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from verl.checkpoint_engine.memory.arena import require_free_bytes
from verl.checkpoint_engine.plan.layout import align
from verl.checkpoint_engine.plan.types import ITEMSIZE
from verl.checkpoint_engine.registry import resolve_backend
from verl.checkpoint_engine.support import envs
from verl.trainer.fleet.session import starts_locally
from verl.trainer.ppo.needs import needs_critic, needs_reference
from verl.trainer.ppo.surroundings import absent_interfaces
from verl.utils.config import ConfigError
from verl.utils.device import resolve_device
from verl.utils.language_model import (
    BFLOAT16_ALONE_ON_CPU,
    PARTLY_COMPUTED,
    SEEING_IN_SGLANG,
    SEEING_IN_VLLM,
    WHY_NOT_IN_VLLM,
    is_wrapper,
    sees,
)
from verl.utils.model import (
    MODEL_KEY,
    expert_count,
    load_hf_config,
    resolve_model_path,
)
from verl.utils.model_files import require_whole_files, weight_tensors
from verl.workers.config import FSDPConfig, HFModelConfig, PPOConfig
from verl.workers.engine.checkpoint_files import METADATA_FILE
from verl.workers.engine.registry import check_engine
from verl.workers.engine.training_state import shapes_in
from verl.workers.hf.checkpoint import HFCheckpoint
from verl.workers.hf.fit import differences, require_whole_model
from verl.workers.hf.precision import names_kept_wide
from verl.workers.hf.regimes import why_engine_differs
from verl.workers.rollout.engine import ends_of_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KEEPING_ALL = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Models whose layers have keys and values of every token, if their `layer_types` do not say otherwise."""


def require_model(model: HFModelConfig, directory: Path) -> None:
    """The files of the policy (and of a separate tokenizer) are complete, and its weights match its config."""
    if model.tokenizer_path is not None and Path(model.tokenizer_path).expanduser().is_dir():
        require_whole_files(Path(model.tokenizer_path).expanduser(), f"{MODEL_KEY}.tokenizer_path")
    key = f"{MODEL_KEY}.path"
    require_whole_model(directory, key, lambda: load_hf_config(model), remote=model.trust_remote_code)
    ends_of_files(directory)  # engines read them, later


def require_model_of_run(config: PPOConfig, resume_from: Path) -> None:
    """The checkpoint's training states are those of the models of this run, by the shapes of tensors.

    Adapters are compared by the ranks, which make them.
    """
    policy = config.actor_rollout_ref.model
    models = {"actor": (policy, f"{MODEL_KEY}.path")}
    if needs_critic(config):
        models["critic"] = (config.critic.hf_model(policy.path), "critic.model.path")
    remedy = "another trainer.default_local_dir, or trainer.resume_mode=disable to start again"
    for part, (model, key) in models.items():
        saved = resume_from / part
        if not (saved / METADATA_FILE).is_file():
            continue
        shapes = shapes_in(saved)
        adapted = any("lora_" in name for name in shapes)
        if shapes and adapted != (model.lora_rank > 0):
            has = "has adapters" if adapted else "has no adapters"
            raise ConfigError(
                f"{saved}, from which the run would go on, {has}: {key.removesuffix('.path')}.lora_rank="
                f"{model.lora_rank} does not fit. Give the rank of that run, {remedy}"
            )
        if adapted:
            continue
        local = model.at(resolve_model_path(model.path))
        found = differences(load_hf_config(local), shapes, key, remote=model.trust_remote_code)
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise ConfigError(
                f"{saved}, from which the run would go on, is not of {key}={model.path}: {found[0]}{more}. Give the "
                f"model of that run, {remedy}"
            )


def require_policy_engines(config: PPOConfig, model: HFModelConfig, device: str) -> None:
    """The engines of actor and reference policy support the model in the local directory `model.path`."""
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    require_engine(config, actor.strategy, actor.fsdp_config, model, device)
    if needs_reference(config) and ref.fsdp_config != actor.fsdp_config:
        require_engine(config, actor.strategy, ref.fsdp_config, model, device)


def require_engine(
    config: PPOConfig, strategy: str, fsdp: FSDPConfig, model: HFModelConfig, device: str, labels: int = 0
) -> None:
    """Engines of `strategy` support the model; `labels` is the number of a critic's outputs, 0 for a policy."""
    check_engine(
        strategy,
        fsdp=fsdp,
        megatron=config.actor_rollout_ref.actor.megatron,
        model=model,
        world_size=config.trainer.world_size,
        device=device,
        labels=labels,
    )


def require_positions(config: PPOConfig) -> None:
    """The model has a position for every token of the longest sequence, or a RoPE that is scaled beyond them."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    model = load_hf_config(config.actor_rollout_ref.model).get_text_config()
    limit = getattr(model, "max_position_embeddings", None)
    stretched = (getattr(model, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
    needed = data.max_prompt_length + data.max_response_length
    if limit is not None and needed > limit and not stretched:
        raise ConfigError(
            f"data.max_prompt_length={data.max_prompt_length} + data.max_response_length={data.max_response_length} = "
            f"{needed} tokens, but {config.actor_rollout_ref.model.path} has max_position_embeddings={limit}"
        )
    if limit is not None and (rollout.max_model_len or 0) > limit and not stretched:
        raise ConfigError(
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len}, but "
            f"{config.actor_rollout_ref.model.path} has max_position_embeddings={limit}"
        )


def require_engine_rotates_as_trainer(config: PPOConfig) -> None:
    """vLLM or SGLang computes the same RoPE as transformers, up to the longest sequence."""
    policy, data = config.actor_rollout_ref, config.data
    if policy.rollout.name not in ("vllm", "sglang"):
        return
    longest = policy.rollout.max_model_len or data.max_prompt_length + data.max_response_length
    model = load_hf_config(policy.model).get_text_config()
    if why := why_engine_differs(model, policy.rollout.name, longest):
        raise ConfigError(f"{MODEL_KEY}.path={policy.model.path}: {why}set rollout.name=hf (they have up to {longest})")


def require_room_for_a_sequence(config: PPOConfig, device: str) -> None:
    """On CPUs, the KV cache of vLLM holds the longest sequence, which vLLM asks when it has loaded the model. Known of
    models whose layers all keep every token."""
    policy, data = config.actor_rollout_ref, config.data
    model = load_hf_config(policy.model).get_text_config()
    if device != "cpu" or policy.rollout.name != "vllm" or model.model_type not in KEEPING_ALL:
        return
    arguments = policy.rollout.engine_kwargs.get("vllm") or {}
    if any(name.startswith(("kv_", "num_gpu_blocks", "hf_overrides")) for name in arguments):
        return  # the cache is another
    if any(kind != "full_attention" for kind in getattr(model, "layer_types", None) or ()):
        return
    heads = math.ceil(model.num_key_value_heads / policy.rollout.tensor_model_parallel_size)
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    nbytes = 2 * model.num_hidden_layers * heads * head_dim * ITEMSIZE[policy.rollout.dtype]
    longest = policy.rollout.max_model_len or data.max_prompt_length + data.max_response_length
    if longest * nbytes > policy.rollout.cpu_kvcache_gib * 2**30:
        raise ConfigError(
            f"actor_rollout_ref.rollout.cpu_kvcache_gib={policy.rollout.cpu_kvcache_gib:g} does not hold one sequence, "
            f"{longest} tokens of {nbytes} bytes: set it to {longest * nbytes / 2**30:.2g} or more, for several at once"
        )


def require_heads(config: PPOConfig) -> None:
    """Every rank of a replica gets whole attention heads."""
    policy = config.actor_rollout_ref
    heads = getattr(load_hf_config(policy.model).get_text_config(), "num_attention_heads", None)
    if heads is not None and heads % policy.rollout.tensor_model_parallel_size:
        raise ConfigError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={policy.rollout.tensor_model_parallel_size} does "
            f"not divide the {heads} attention heads of {policy.model.path}"
        )


def require_text_of_wrapper(config: PPOConfig) -> None:
    """For a language model within a multimodal one: refuse what does not work or is untested."""
    policy, model = config.actor_rollout_ref, load_hf_config(config.actor_rollout_ref.model)
    named = f"{MODEL_KEY}.path={policy.model.path}: {model.model_type}"
    if model.model_type.startswith("qwen3_5"):  # the code of its language model is in one file with that of its tower
        _require_torchvision(config, named)
    if not is_wrapper(model):
        return
    what = f"{named}, which is more than a language model,"
    if policy.rollout.name not in ("vllm", "hf"):
        raise ConfigError(f"{what} has not been tried with rollout.name={policy.rollout.name}: set it to vllm or hf")
    _require_torchvision(config, what)
    if policy.model.sends_adapters:
        raise ConfigError(f"{what} has not been tried with lora.merge=false: set {MODEL_KEY}.lora.merge=true")
    if needs_critic(config) and config.critic.model.path is None:
        raise ConfigError(
            f"{what} is no model for a critic: set critic.model.path to a language model, or an estimator without a "
            "critic, such as algorithm.adv_estimator=grpo"
        )


def _require_torchvision(config: PPOConfig, what: str) -> None:
    if config.actor_rollout_ref.rollout.name == "vllm" and find_spec("torchvision") is None:
        raise ConfigError(
            f"{what} is built by vLLM with torchvision, which is not installed: add the build for this torch (on CPUs: "
            "pip install torchvision --index-url https://download.pytorch.org/whl/cpu), or set rollout.name=hf"
        )


def _interleaves_in_vllm(model: PretrainedConfig) -> bool:
    return bool(model.get_text_config().rope_parameters.get("mrope_interleaved"))


def require_sight(config: PPOConfig, *, stood_in_for: bool = False) -> None:
    """For a multimodal policy: refuse settings that would drop its pictures or are untested. `stood_in_for`: a built-in
    model stands in for one, and its data have pictures."""
    policy, model = config.actor_rollout_ref, load_hf_config(config.actor_rollout_ref.model)
    if not (sees(model) or stood_in_for):
        return
    what = f"{MODEL_KEY}.path={policy.model.path}: {model.model_type}, which sees,"
    if stood_in_for:
        what = "data.image_key asks for a model that sees, which"
    actor = "actor_rollout_ref.actor"
    shared = [each.ulysses_sequence_parallel_size for each in (policy.actor.fsdp_config, policy.ref.fsdp_config)]
    for is_so, key, remedy in (
        (
            policy.rollout.name not in ("vllm", "sglang", "hf"),
            f"rollout.name={policy.rollout.name}",
            "actor_rollout_ref.rollout.name=vllm, sglang or hf",
        ),
        (policy.actor.strategy == "megatron", f"{actor}.strategy=megatron", f"{actor}.strategy=fsdp2"),
        (
            policy.rollout.kv_across_versions != "clear",
            f"rollout.kv_across_versions={policy.rollout.kv_across_versions}",
            "actor_rollout_ref.rollout.kv_across_versions=clear",
        ),
        (
            needs_critic(config) and config.critic.strategy == "megatron",
            "critic.strategy=megatron",
            "critic.strategy=fsdp2",
        ),
        (
            policy.actor.strategy == "fsdp" and model.model_type in PARTLY_COMPUTED,
            f"{actor}.strategy=fsdp, of which a part of its tower would be lost that nothing is computed from",
            f"{actor}.strategy=fsdp2",
        ),
        (policy.model.sends_adapters, f"{MODEL_KEY}.lora.merge=false", f"{MODEL_KEY}.lora.merge=true"),
        (
            policy.rollout.quantization is not None,
            f"rollout.quantization={policy.rollout.quantization}",
            "actor_rollout_ref.rollout.quantization=null",
        ),
        (max(shared) > 1, "ulysses_sequence_parallel_size > 1", "it to 1"),
        (stood_in_for and config.distillation.enabled, "distillation.enabled=true", "it to false"),
        (stood_in_for and config.reward_model.enable, "reward_model.enable=true", "it to false"),
    ):
        if is_so:
            raise ConfigError(f"{what} has not been tried with {key}: set {remedy}")
    if not stood_in_for:
        _require_served(config, model, what)
        _require_torchvision(config, what)
        _require_order_of_positions(policy.rollout.name, model, what)


def _require_served(config: PPOConfig, model: PretrainedConfig, what: str) -> None:
    """The engine computes what transformers does. Published checkpoints have the fields that are asked for here."""
    rollout, kind, text = config.actor_rollout_ref.rollout, model.model_type, model.get_text_config()
    if rollout.name == "sglang":
        _require_served_by_sglang(model, what)
    if rollout.name != "vllm":
        return
    if kind not in SEEING_IN_VLLM:
        raise ConfigError(
            f"{what} is not served with pictures by vLLM: {WHY_NOT_IN_VLLM[kind]}: set "
            f"actor_rollout_ref.rollout.name=hf (vLLM: {', '.join(SEEING_IN_VLLM)})"
        )
    if kind == "glm4v" and "partial_rotary_factor" not in text.rope_parameters:
        raise ConfigError(
            f"{what} has no text_config.rope_parameters.partial_rotary_factor in its config.json, without which "
            "transformers rotates whole heads, and vLLM half of each: add it, or set actor_rollout_ref.rollout.name=hf"
        )
    if kind == "qwen3_vl_moe":
        _require_published_experts(config, text, what)
    if kind in ("llava", "llava_next"):
        _require_tried_tower(model, what)
    if kind in ("llava", "llava_next", "gemma3"):
        _require_published_tower(config, what)
    on_cpu = resolve_device(config.trainer.device) == "cpu"
    if kind in BFLOAT16_ALONE_ON_CPU and rollout.dtype != "bfloat16" and on_cpu:
        raise ConfigError(
            f"{what} is computed in bfloat16 alone by vLLM on CPUs: set actor_rollout_ref.rollout.dtype=bfloat16, or "
            "actor_rollout_ref.rollout.name=hf"
        )


def _require_served_by_sglang(model: PretrainedConfig, what: str) -> None:
    if model.model_type not in SEEING_IN_SGLANG:
        raise ConfigError(
            f"{what} is not served with pictures by SGLang ({', '.join(SEEING_IN_SGLANG)} are): set "
            "actor_rollout_ref.rollout.name=vllm, or hf"
        )
    if model.model_type == "qwen2_vl" and not hasattr(model.vision_config, "in_chans"):
        raise ConfigError(
            f"{what} has no vision_config.in_chans in its config.json, which SGLang reads: add it (3 for colours), or "
            "set actor_rollout_ref.rollout.name=vllm, or hf"
        )


def _require_tried_tower(model: PretrainedConfig, what: str) -> None:
    """LLaVA's may be of any kind, and transformers joins the states of several of its layers."""
    tower, layers = model.vision_config.model_type, model.vision_feature_layer
    tried = ("pixtral", "siglip_vision_model") if model.model_type == "llava" else ()
    if tower not in ("clip_vision_model", *tried):
        raise ConfigError(f"{what} has a tower of {tower}, with which vLLM has not been tried: set rollout.name=hf")
    if not isinstance(layers, int):
        raise ConfigError(
            f"{what} has vision_feature_layer={layers} in its config.json, and vLLM takes the states of one layer "
            "alone: set actor_rollout_ref.rollout.name=hf"
        )


def _require_published_experts(config: PPOConfig, text: PretrainedConfig, what: str) -> None:
    """transformers transposes experts whose shapes are not its own, vLLM transposes all of them."""
    if not getattr(text, "norm_topk_prob", False):
        raise ConfigError(
            f"{what} has weights of experts that transformers always normalizes, and vLLM by a key: set "
            "text_config.norm_topk_prob=true in its config.json, or actor_rollout_ref.rollout.name=hf"
        )
    path = config.actor_rollout_ref.model.path
    hidden, inner = text.hidden_size, text.moe_intermediate_size
    published = {".experts.gate_up_proj": [hidden, 2 * inner], ".experts.down_proj": [inner, hidden]}
    for name, (_, shape) in weight_tensors(resolve_model_path(path), f"{MODEL_KEY}.path").items():
        expected = next((shape for end, shape in published.items() if name.endswith(end)), None)
        if expected is not None and (list(shape[1:]) != expected or expected[0] == expected[1]):
            raise ConfigError(
                f"{what} has {name} {list(shape)}, of which vLLM wants {[shape[0], *expected]}, other than its "
                "transpose: give a checkpoint as published, or set actor_rollout_ref.rollout.name=hf"
            )


def _require_published_tower(config: PPOConfig, what: str) -> None:
    """transformers reads names of CLIP's and SigLIP's tensors with `vision_model` and without, vLLM with it alone."""
    directory = resolve_model_path(config.actor_rollout_ref.model.path)
    for name in weight_tensors(directory, f"{MODEL_KEY}.path"):
        if "vision_tower.embeddings." in name:
            other = name.replace("vision_tower.", "vision_tower.vision_model.")
            raise ConfigError(
                f"{what} has {name}, which vLLM knows as {other} alone: give a checkpoint as published, or set "
                "actor_rollout_ref.rollout.name=hf"
            )


def _require_order_of_positions(engine: str, model: PretrainedConfig, what: str) -> None:
    interleaves = model.model_type.startswith(("qwen3_vl", "qwen3_5"))
    if engine == "vllm" and interleaves != _interleaves_in_vllm(model):
        raise ConfigError(
            f"{what} has positions of pictures that transformers interleaves by its class, and vLLM by a key: set "
            f"text_config.rope_parameters.mrope_interleaved={str(interleaves).lower()} in its config.json, or "
            "actor_rollout_ref.rollout.name=hf"
        )


def require_experts(config: PPOConfig) -> None:
    """Data-parallel ranks within one replica need a model with experts, which they share."""
    policy = config.actor_rollout_ref
    if policy.rollout.data_ranks > 1 and not expert_count(load_hf_config(policy.model)):
        raise ConfigError(
            f"actor_rollout_ref.rollout.expert_parallel_size={policy.rollout.expert_parallel_size}: the model "
            f"{policy.model.path} has no experts to deal out; set it to 1"
        )


def shapes_of_adapters(config: PPOConfig, model_path: Path) -> list[tuple[int, ...]]:
    """LoRA adapters' shapes. Raises ConfigError without target modules, BackendUnavailable without the package."""
    model = config.actor_rollout_ref.model
    if not model.lora_rank:
        return []
    local = model.at(model_path)
    if config.actor_rollout_ref.actor.strategy == "megatron":
        from verl.workers.engine.megatron.adapted import with_adapters

        _, shapes = with_adapters(local, load_hf_config(local))
    else:
        from verl.workers.engine.fsdp.model import adapter_shapes

        shapes = adapter_shapes(local)
    return list(shapes.values())


def nbytes_of_arena(config: PPOConfig, model_path: Path, adapters: Sequence[tuple[int, ...]]) -> int:
    """Bytes of shared memory for each rollout node's arena. `adapters` are the shapes of the model's adapters."""
    itemsize = ITEMSIZE[config.actor_rollout_ref.rollout.dtype]
    if config.actor_rollout_ref.model.sends_adapters:
        sizes = [math.prod(shape) * itemsize for shape in adapters]
    else:
        with HFCheckpoint(model_path) as checkpoint:
            wide = names_kept_wide(checkpoint.shapes, checkpoint)
            sizes = [
                math.prod(shape) * (max(itemsize, ITEMSIZE["float32"]) if name in wide else itemsize)
                for name, shape in checkpoint.shapes.items()
            ]
    return sum(map(align, sizes)) * config.checkpoint_engine.slots


def require_of_this_host(config: PPOConfig, arena_nbytes: int) -> None:
    """If the run is on this host: it has the interfaces of the environment, and shared memory and backend of rollout
    nodes. Also raises BackendUnavailable.

    The cluster checks the other hosts before their engines start.
    """
    for line in absent_interfaces(config, resolve_device(config.trainer.device)):
        raise ConfigError(line)
    colocated = config.trainer.placement == "colocated"
    if not colocated and not starts_locally(config.ray_kwargs.ray_init):
        return
    arenas = 1 if colocated else config.actor_rollout_ref.rollout.nnodes
    require_free_bytes(envs.shm_dir(), arena_nbytes, arenas=arenas)
    resolve_backend(config.checkpoint_engine).check_host(config.checkpoint_engine)


def require_writable_files(config: PPOConfig) -> None:
    """Raises ConfigError for output paths that a run could not write later."""
    for key, directory in (
        ("trainer.rollout_data_dir", config.trainer.rollout_data_dir),
        ("trainer.validation_data_dir", config.trainer.validation_data_dir),
    ):
        if directory is not None:
            require_writable(key, directory)
    for key, file in (
        ("checkpoint_engine.report_path", config.checkpoint_engine.report_path),
        ("ray_kwargs.timeline_json_file", config.ray_kwargs.timeline_json_file),
    ):
        if file is not None:
            require_writable(f"the directory of {key}", str(Path(file).parent))
            if Path(file).is_dir():
                raise ConfigError(f"{key}={file} is a directory, not a file")


def require_writable(what: str, directory: str) -> Path:
    """Raises ConfigError unless files can be created in `directory`, which is created if missing."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory):
            return Path(directory)
    except OSError as exc:
        raise ConfigError(f"{what}={directory} is not writable: {exc.strerror}") from exc
