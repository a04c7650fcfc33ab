"""Check that ranks can divide a model as configured. Pure: the driver calls it before any process starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from verl.utils.config import ConfigError, did_you_mean
from verl.utils.dropout import KEEP, OFF, random_fields
from verl.utils.model import MODEL_KEY, load_hf_config
from verl.workers.config.megatron import MegatronConfig
from verl.workers.config.model import HFModelConfig
from verl.workers.engine.megatron.architectures import TIED_NAME, VALUE_HEAD, architecture_of
from verl.workers.engine.megatron.installed import require_installed
from verl.workers.engine.megatron.layout import Dimensions, ParallelSizes, tensor_shapes
from verl.workers.hf.checkpoint import HFCheckpoint
from verl.workers.hf.conversion import listed_names

RECORD = "metadata.json"
"""A file in every distributed checkpoint of Megatron."""
KEY = "actor_rollout_ref.actor.megatron"
OF_MODEL = frozenset(
    [
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "ffn_hidden_size",
        "num_moe_experts",
        "moe_router_topk",
        "moe_router_pre_softmax",
        "moe_ffn_hidden_size",
        "normalization",
        "layernorm_epsilon",
        "qk_layernorm",
        "add_bias_linear",
        "add_qkv_bias",
        "gated_linear_unit",
        "activation_func",
        "params_dtype",
        "bf16",
        "fp16",
        "use_cpu_initialization",
        "perform_initialization",
        "variable_seq_lengths",
        "calculate_per_token_loss",
        "sequence_parallel",
        "moe_grouped_gemm",
        "moe_shared_expert_intermediate_size",
    ]
)
"""Fields of Megatron's configuration that the user must not override: the weights or the engine depend on them."""
OF_LAYOUT = ("num_layers", "pipeline_", "account_for_", "virtual_pipeline", "multi_latent", "mtp_")

NARROW = ("fp8", "fp4")


class Checkpoint(Protocol):
    """Names and shapes of a Hugging Face checkpoint."""

    @property
    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...


def check_job(config: MegatronConfig, model_config: HFModelConfig, world: int, device: str, labels: int) -> None:
    """Check a job of `world` trainer ranks; `model_config.path` is a local directory. `labels`: see `Dimensions`.

    Raises ConfigError.
    """
    require_installed()
    with HFCheckpoint(Path(model_config.path)) as checkpoint:
        check(
            config,
            load_hf_config(model_config),
            world=world,
            device=device,
            checkpoint=checkpoint,
            labels=labels,
            dropout=model_config.dropout,
        )


def sizes_of(config: MegatronConfig, world: int) -> ParallelSizes:
    return ParallelSizes(
        world=world,
        tensor=config.tensor_model_parallel_size,
        pipeline=config.pipeline_model_parallel_size,
        expert=config.expert_model_parallel_size,
        expert_tensor=config.expert_tensor_parallel_size or config.tensor_model_parallel_size,
        first_stage_layers=config.num_layers_in_first_pipeline_stage,
        last_stage_layers=config.num_layers_in_last_pipeline_stage,
        counts_embedding=config.account_for_embedding_in_pipeline_split,
        counts_loss=config.account_for_loss_in_pipeline_split,
    )


def check(
    config: MegatronConfig,
    hf_config: Any,
    *,
    world: int,
    device: str,
    checkpoint: Checkpoint,
    labels: int = 0,
    dropout: str = OFF,
) -> None:
    """Raises ConfigError with a line for each problem: layout, fields of the config, tensors."""
    architecture = architecture_of(hf_config.model_type, "critic.strategy" if labels else "strategy")
    dims = Dimensions.of(hf_config, padded_vocab=config.padded_vocab(hf_config.vocab_size), labels=labels)
    problems = [
        *_ranks(config, sizes_of(config, world)),
        *_cuts(config, dims, sizes_of(config, world)),
        *_experts(config, dims, device),
        *_overrides(config),
        *_dropout(config, dropout, "critic.model" if labels else MODEL_KEY),
        *_first_weights(config),
        *_fields(hf_config),
        *_tensors(tensor_shapes(architecture, dims), checkpoint, dims),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _ranks(config: MegatronConfig, sizes: ParallelSizes) -> Iterator[str]:
    tensor = f"{KEY}.tensor_model_parallel_size={sizes.tensor}"
    pipeline = f"pipeline_model_parallel_size={sizes.pipeline}"
    if sizes.world % (sizes.tensor * sizes.pipeline):
        yield (
            f"{tensor} * {pipeline} = {sizes.tensor * sizes.pipeline} does not divide {sizes.world} trainer ranks "
            "(trainer.nnodes * trainer.n_gpus_per_node)"
        )
    whole = sizes.expert_tensor * sizes.expert * sizes.pipeline
    if sizes.expert > 1 and sizes.world % whole:
        stated = "" if config.expert_tensor_parallel_size else " (that of tensor_model_parallel_size)"
        yield (
            f"{KEY}.expert_model_parallel_size={sizes.expert} * expert_tensor_parallel_size={sizes.expert_tensor}"
            f"{stated} * {pipeline} = {whole} does not divide {sizes.world} trainer ranks; more ranks, or "
            f"{KEY}.expert_tensor_parallel_size=1"
        )


def _cuts(config: MegatronConfig, dims: Dimensions, sizes: ParallelSizes) -> Iterator[str]:
    for what, count in (
        ("num_attention_heads", dims.heads),
        ("num_key_value_heads", dims.groups),
        ("intermediate_size", dims.ffn),
    ):
        if count % sizes.tensor:
            yield f"{KEY}.tensor_model_parallel_size={sizes.tensor} does not divide the model's {what}={count}"
    if dims.heads % dims.groups:
        yield f"the model's num_key_value_heads={dims.groups} does not divide its num_attention_heads={dims.heads}"
    if sizes.stages(dims.layers) is None and (sizes.counts_embedding or sizes.counts_loss):
        counted = dims.layers + sizes.counts_embedding + sizes.counts_loss
        yield (
            f"{KEY}.pipeline_model_parallel_size={sizes.pipeline} cannot cut num_hidden_layers={dims.layers}, which "
            f"account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split make {counted}, in equal "
            "parts, of at least one and with no num_layers_in_first_pipeline_stage or "
            "num_layers_in_last_pipeline_stage beside them"
        )
    elif sizes.stages(dims.layers) is None:
        yield (
            f"{KEY}.pipeline_model_parallel_size={sizes.pipeline} cannot cut num_hidden_layers={dims.layers} with "
            f"num_layers_in_first_pipeline_stage={config.num_layers_in_first_pipeline_stage} and "
            f"num_layers_in_last_pipeline_stage={config.num_layers_in_last_pipeline_stage}: the other stages must have "
            "equally many layers, at least one; state the layers of the first or last stage"
        )
    if dims.padded_vocab < dims.vocab:
        yield (
            f"{KEY}.padded_vocab_size={dims.padded_vocab} would cut the model's vocab_size={dims.vocab}; leave it null"
        )
    elif dims.padded_vocab % sizes.tensor:
        yield (
            f"{KEY}.padded_vocab_size={dims.padded_vocab} cannot be divided by "
            f"tensor_model_parallel_size={sizes.tensor}; leave it null"
        )


def _experts(config: MegatronConfig, dims: Dimensions, device: str) -> Iterator[str]:
    expert, tensor = config.expert_model_parallel_size, config.tensor_model_parallel_size
    if not dims.experts:
        if expert > 1:
            yield f"{KEY}.expert_model_parallel_size={expert}, but the model has no experts; 1 is for dense models"
        if config.router_replay.mode != "disabled":
            yield f"{KEY}.router_replay.mode={config.router_replay.mode}, but the model has no experts"
        return
    if dims.experts % expert:
        yield f"{KEY}.expert_model_parallel_size={expert} does not divide the model's num_experts={dims.experts}"
    each = config.expert_tensor_parallel_size or tensor
    if dims.expert_ffn % each:
        yield (
            f"{KEY}.expert_tensor_parallel_size={each} does not divide the model's "
            f"moe_intermediate_size={dims.expert_ffn}"
        )
    if device == "cpu" and each > 1 and expert > 1:
        yield (
            f"{KEY}.expert_tensor_parallel_size={each} with expert_model_parallel_size={expert} gathers unequal "
            f"numbers of tokens, which gloo (trainer.device=cpu) cannot; set {KEY}.expert_tensor_parallel_size=1"
        )
    if tensor > 1 and not config.sequence_parallel:
        yield (f"{KEY}.tensor_model_parallel_size={tensor} of a model with experts needs {KEY}.sequence_parallel=true")


def _overrides(config: MegatronConfig) -> Iterator[str]:
    """Fields of Megatron's own configuration that the user names: they exist, and nothing else decides about them."""
    if not config.override_transformer_config:
        return
    from verl.workers.engine.megatron.library import TransformerConfig

    known = {field.name for field in fields(TransformerConfig)}
    for name in config.override_transformer_config:
        key = f"{KEY}.override_transformer_config.{name}"
        if name not in known:
            yield f"{key}: megatron-core's TransformerConfig has no such field.{did_you_mean(name, known)}"
        elif name.startswith(NARROW):
            yield f"{key}: layers that compute in {name[:3]} are Transformer Engine's, and here are megatron-core's own"
        elif name in OF_MODEL or name.endswith("_parallel_size") or name.startswith(OF_LAYOUT):
            yield f"{key} cannot be set: it follows from the checkpoint and from the other keys of {KEY}"


def _dropout(config: MegatronConfig, dropout: str, section: str) -> Iterator[str]:
    if dropout == OFF:
        for path, value in random_fields(config.override_transformer_config):
            yield (
                f"{KEY}.override_transformer_config.{'.'.join(path)}={value}, but with {section}.dropout={OFF} "
                f"nothing is dropped: set {section}.dropout={KEEP}, or leave the override out"
            )


def _first_weights(config: MegatronConfig) -> Iterator[str]:
    path = config.dist_checkpointing_path
    if not config.use_dist_checkpointing:
        return
    if not path:
        yield f"{KEY}.use_dist_checkpointing=true needs {KEY}.dist_checkpointing_path"
    elif not (Path(path).expanduser() / RECORD).is_file():
        yield f"{KEY}.dist_checkpointing_path={path} is no distributed checkpoint of Megatron's: it has no {RECORD}"


def _fields(hf_config: Any) -> Iterator[str]:
    for name, value in architecture_of(hf_config.model_type).fixed.items():
        if (found := getattr(hf_config, name, value)) != value:
            yield (
                f"strategy=megatron has no map for {hf_config.model_type} with {name}={found!r}, only with {value!r}; "
                "strategy=fsdp2 trains it"
            )
    rope = getattr(hf_config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind not in ("default", "llama3") or (kind == "llama3" and any(rope.get(k) != v for k, v in llama3.items())):
        yield (
            f"strategy=megatron computes plain rotary positions and Llama 3's, not {dict(rope)}; "
            "strategy=fsdp2 trains the model"
        )


def _tensors(shapes: dict[str, tuple[int, ...]], checkpoint: Checkpoint, dims: Dimensions) -> Iterator[str]:
    """Every name and shape that differs, in one line."""
    allowed = {TIED_NAME} if dims.tied or dims.labels else set()
    new = {name for row in VALUE_HEAD for name in row.hugging_face}
    names = {name for name in checkpoint.names if not name.endswith(".rotary_emb.inv_freq")}
    missing = sorted(shapes.keys() - names - new)
    unexpected = sorted(names - shapes.keys() - allowed)
    different = [
        f"{name}: {shape} in the model, {tuple(checkpoint.shape(name))} in the checkpoint"
        for name, shape in shapes.items()
        if name in names and tuple(checkpoint.shape(name)) != shape
    ]
    if missing or unexpected or different:
        yield (
            "strategy=megatron takes a checkpoint that has the model's tensors, each by itself under its usual name, "
            f"and no others; in the model only: {listed_names(missing)}; in the checkpoint only: "
            f"{listed_names(unexpected)}; shapes: {'; '.join(different) or 'the same'}; strategy=fsdp2 takes what "
            "transformers takes"
        )
