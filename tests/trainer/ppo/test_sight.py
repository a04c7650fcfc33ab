"""What a run with a policy that sees is refused for, before anything starts."""

from __future__ import annotations

import json
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.pictures import in_bytes, noise, row, write
from tests.seeing import make_seeing
from verl.experimental.agent_loop.manager import AgentLoopManager
from verl.trainer.config.loader import load_config, resolve_config
from verl.trainer.ppo import requirements
from verl.trainer.ppo.data import build_dataloaders, require_seen
from verl.trainer.ppo.job import local_critic
from verl.trainer.ppo.requirements import require_sight
from verl.utils.builtin import make_tiny_model
from verl.utils.builtin.seeing import make_tiny_seeing_model
from verl.utils.config import ConfigError
from verl.utils.language_model import sees
from verl.utils.model import load_hf_config, load_tokenizer
from verl.utils.pictures import load_processor
from verl.workers.config import CriticConfig

LORA = "actor_rollout_ref.model.lora_rank=4"
SGLANG = "actor_rollout_ref.rollout.name=sglang"
HF, GRPO = "actor_rollout_ref.rollout.name=hf", "algorithm.adv_estimator=grpo"
GAE = "algorithm.adv_estimator=gae"
BLIND = "tests.experimental.agent_loop.fakes:ConstantLoop"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_seeing_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([GRPO], "is built by vLLM with torchvision, which is not installed: add the build for this torch"),
        ([GRPO, "actor_rollout_ref.rollout.quantization=fp8"], "with rollout.quantization=fp8: set"),
        ([HF, GRPO, "actor_rollout_ref.actor.strategy=megatron"], "strategy=megatron"),
        ([GRPO, LORA, "actor_rollout_ref.model.lora.merge=false"], "lora.merge=false: set actor"),
        ([HF, GRPO, "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"], "ulysses"),
        ([HF, GAE, "critic.strategy=megatron"], "with critic.strategy=megatron: set critic.strategy=fsdp2"),
    ],
)
def test_what_a_policy_that_sees_is_not_trained_with_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], said: str
) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    config = load_config([f"actor_rollout_ref.model.path={model}", "trainer.n_gpus_per_node=2", *overrides])
    with pytest.raises(ConfigError, match="qwen2_5_vl, which sees,") as refusal:
        require_sight(config)
    assert said in str(refusal.value)


@pytest.mark.parametrize("architecture", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_sglang_serves_pictures_of_what_it_has_been_compared_on(tmp_path: Path, architecture: str) -> None:
    model = make_tiny_seeing_model(tmp_path, architecture)
    require_sight(load_config([f"actor_rollout_ref.model.path={model}", GRPO, SGLANG]))


def test_sglang_is_refused_for_others_and_for_a_configuration_that_it_cannot_read(tmp_path: Path) -> None:
    def refusal(model: Path) -> str:
        with pytest.raises(ConfigError) as refused:
            require_sight(load_config([f"actor_rollout_ref.model.path={model}", GRPO, SGLANG]))
        return str(refused.value)

    said = refusal(make_seeing(tmp_path / "glm", "glm4v"))
    assert "glm4v, which sees, is not served with pictures by SGLang (qwen2_vl, qwen2_5_vl, qwen3_vl are): set" in said
    described = make_tiny_seeing_model(tmp_path / "qwen", "qwen2_vl") / "config.json"
    whole = json.loads(described.read_text())
    del whole["vision_config"]["in_chans"]
    described.write_text(json.dumps(whole))
    assert "has no vision_config.in_chans in its config.json, which SGLang reads: add it" in refusal(described.parent)


def test_videos_are_refused_with_sglang(tmp_path: Path) -> None:
    data = SimpleNamespace(filmed="data.train_files: row 3 of x.parquet", pictured={})
    config = load_config([f"actor_rollout_ref.model.path={make_tiny_seeing_model(tmp_path)}", SGLANG])
    with pytest.raises(ConfigError, match="row 3 of x.parquet: the sample has a video, which SGLang does not get"):
        require_seen(config, data, AgentLoopManager)


@pytest.mark.parametrize(
    ("family", "field", "value", "said"),
    [
        ("glm4v", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, "vLLM half of each: add it"),
        ("qwen3_vl_moe", "norm_topk_prob", False, "set text_config.norm_topk_prob=true in its config.json"),
    ],
)
def test_what_vllm_would_compute_differently_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, field: str, value: Any, said: str
) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: True)
    model = make_seeing(tmp_path / "model", family)
    config = load_config([f"actor_rollout_ref.model.path={model}", GRPO])
    require_sight(config)
    file = model / "config.json"
    described = json.loads(file.read_text())
    described["text_config"][field] = value
    file.write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=f"{family}, which sees,") as refusal:
        require_sight(config)
    assert said in str(refusal.value)
    require_sight(load_config([f"actor_rollout_ref.model.path={model}", GRPO, HF]))


def test_a_tower_of_another_kind_is_not_served_by_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: True)
    model = make_seeing(tmp_path / "model", "llava")
    asked = [f"actor_rollout_ref.model.path={model}", GRPO]
    require_sight(load_config(asked))
    file = model / "config.json"
    before = json.loads(file.read_text())
    tower = before["vision_config"] | {"model_type": "dinov2"}
    for other, said in (
        ({"vision_config": tower}, "llava, which sees, has a tower of dinov2, with which vLLM has not"),
        ({"vision_feature_layer": [-2, -1]}, "has vision_feature_layer=.-2, -1. in its config.json, and vLLM takes"),
    ):
        file.write_text(json.dumps(before | other))
        with pytest.raises(ConfigError, match=said):
            require_sight(load_config(asked))
        require_sight(load_config([*asked, HF]))


def test_experts_that_vllm_would_transpose_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers writes them of a model that it did not read."""
    monkeypatch.setattr(requirements, "find_spec", lambda name: True)
    model = make_seeing(tmp_path / "model", "qwen3_vl_moe")
    config = load_config([f"actor_rollout_ref.model.path={model}", GRPO])
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="of which vLLM wants .4, 48, 64., other than its transpose"):
        require_sight(config)


def test_a_tower_whose_names_vllm_does_not_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers writes them of a model that it did not read."""
    monkeypatch.setattr(requirements, "find_spec", lambda name: True)
    model = make_seeing(tmp_path / "model", "llava")
    config = load_config([f"actor_rollout_ref.model.path={model}", GRPO])
    require_sight(config)
    file = model / "model.safetensors"
    tensors = {name.replace(".vision_model.", "."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="which vLLM knows as vision_tower.vision_model.embeddings"):
        require_sight(config)


def test_what_vllm_computes_in_bfloat16_alone_is_refused_in_another_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: True)
    model = make_seeing(tmp_path / "model", "qwen3_5")
    given = [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.model.language_model_only=false", GRPO]
    require_sight(load_config(given))
    with pytest.raises(ConfigError, match="in bfloat16 alone by vLLM on CPUs: set"):
        require_sight(load_config([*given, "actor_rollout_ref.rollout.dtype=float32", "trainer.device=cpu"]))


def test_a_multimodal_checkpoint_sees_where_that_is_asked_for(tmp_path: Path) -> None:
    model = make_seeing(tmp_path / "gemma3", "gemma3")
    given = [f"actor_rollout_ref.model.path={model}", HF, GRPO]
    whole = [*given, "actor_rollout_ref.model.language_model_only=false"]
    for overrides, is_seen in ((given, False), (whole, True)):
        config = load_config(overrides)
        require_sight(config)
        assert sees(load_hf_config(config.actor_rollout_ref.model)) is is_seen
    for more, said in (
        (
            "actor_rollout_ref.rollout.name=vllm",
            "is not served with pictures by vLLM: on CPUs it lets tokens of a picture see earlier ones",
        ),
        ("actor_rollout_ref.actor.strategy=fsdp", "of which a part of its tower would be lost"),
    ):
        with pytest.raises(ConfigError, match="gemma3, which sees,") as refusal:
            require_sight(load_config([*whole, more]))
        assert said in str(refusal.value)
    with pytest.raises(ConfigError, match="the model reads text alone"):
        load_config([*given, "data.image_key=images"])
    assert load_config([*whole, "data.image_key=images"]).data.image_key == "images"


def test_a_model_of_which_the_wanted_part_is_not_trained_is_refused(model: Path, tmp_path: Path) -> None:
    text = make_tiny_model(tmp_path, "qwen2")
    for path, only, said in (
        (text, "false", "language_model_only=false, and qwen2 is not trained with pictures"),
        (model, "true", "language_model_only=true, and qwen2_5_vl is only trained as a whole"),
    ):
        config = load_config(
            [f"actor_rollout_ref.model.path={path}", f"actor_rollout_ref.model.language_model_only={only}", HF, GRPO]
        )
        with pytest.raises(ConfigError, match=said):
            require_sight(config)


def test_adapters_are_taken(model: Path) -> None:
    require_sight(load_config([f"actor_rollout_ref.model.path={model}", HF, GRPO, LORA]))


def test_a_critic_sees_what_the_policy_sees(model: Path, tmp_path: Path) -> None:
    def critic(*overrides: str) -> CriticConfig | None:
        config = load_config([f"actor_rollout_ref.model.path={model}", HF, GAE, *overrides])
        require_sight(config)
        return local_critic(config, load_tokenizer(config.actor_rollout_ref.model), model, "cpu")

    assert critic() is not None
    other = shutil.copytree(model, tmp_path / "other")
    found = critic(f"critic.model.path={other}")
    assert found is not None
    assert found.model.path == str(other)
    text = make_tiny_model(tmp_path / "text", "qwen2")
    with pytest.raises(ConfigError, match="critic.model.path=.*: qwen2 reads text alone, and the policy sees pictures"):
        critic(f"critic.model.path={text}")
    settings = json.loads((other / "preprocessor_config.json").read_text()) | {"image_mean": [0.1, 0.2, 0.3]}
    (other / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="pictures do not become what the policy's do: image_mean differ"):
        critic(f"critic.model.path={other}")


def test_vllm_is_taken_where_torchvision_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: ModuleSpec(name, None))
    require_sight(load_config([f"actor_rollout_ref.model.path={model}", GRPO]))


def test_positions_of_pictures_that_vllm_orders_otherwise_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: ModuleSpec(name, None))
    path = make_tiny_seeing_model(tmp_path, "qwen3_vl")
    config = load_config([f"actor_rollout_ref.model.path={path}", GRPO])
    require_sight(config)
    written = json.loads((path / "config.json").read_text())
    del written["text_config"]["rope_parameters"]["mrope_interleaved"]
    (path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=r"vLLM by a key: set text_config.rope_parameters.mrope_interleaved=true in"):
        require_sight(config)


@pytest.mark.parametrize(
    ("agent", "manager", "said"),
    [
        ({}, AgentLoopManager, None),
        ({"agent_name": "tool_agent"}, AgentLoopManager, None),
        ({"agent_name": BLIND}, AgentLoopManager, f"which agent_name={BLIND} does not show to the policy"),
        ({}, SimpleNamespace(), "which the agent loop of samples that name none does not show to the policy"),
    ],
)
def test_samples_with_pictures_are_refused_where_their_agent_does_not_show_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: dict[str, str], manager: Any, said: str | None
) -> None:
    monkeypatch.setenv("VERL_CACHE_DIR", str(tmp_path / "cache"))
    rows = [
        row("no picture", [], agent_name=None),
        row("<image>?", in_bytes(noise()), **({"agent_name": None} | agent)),
    ]
    file = write(tmp_path / "d.parquet", [{**each, "data_source": "builtin/shapes"} for each in rows])
    overrides = (f"data.train_files={file}", f"data.val_files={file}", "data.train_batch_size=2", HF, GRPO)
    config = load_config([f"actor_rollout_ref.model.path={model}", *overrides])
    processor = load_processor(model, load_hf_config(config.actor_rollout_ref.model))
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    if said is None:
        assert len(build_dataloaders(config, tokenizer, manager, processor)["train"]) == 1
        return
    with pytest.raises(ConfigError, match="row 1 of .*: the sample has pictures") as refusal:
        build_dataloaders(config, tokenizer, manager, processor)
    assert said in str(refusal.value)


def test_the_model_follows_the_data_that_come_with_the_project() -> None:
    shapes = load_config(["data.train_files=builtin:shapes"])
    assert shapes.actor_rollout_ref.model.path == "builtin:tiny-qwen2.5-vl"
    assert shapes.data.val_files == "builtin:shapes"
    assert load_config([]).actor_rollout_ref.model.path == "builtin:tiny-qwen2"
    given = load_config(["data.train_files=builtin:shapes", "actor_rollout_ref.model.path=builtin:tiny-qwen2"])
    assert given.actor_rollout_ref.model.path == "builtin:tiny-qwen2"


def test_a_column_of_pictures_is_taken_where_the_model_sees(model: Path, tmp_path: Path) -> None:
    asked = "data.image_key=images"
    assert load_config([asked, f"actor_rollout_ref.model.path={model}"]).data.image_key == "images"
    assert load_config([asked, "data.train_files=builtin:shapes"]).data.image_key == "images"
    text = make_tiny_model(tmp_path, "qwen2")
    with pytest.raises(ConfigError, match="the model reads text alone: give one that sees"):
        load_config([asked, f"actor_rollout_ref.model.path={text}"])


def test_the_size_of_patches_is_that_of_the_model(model: Path) -> None:
    of_model = f"actor_rollout_ref.model.path={model}"
    load_config([of_model, "data.image_patch_size=14"])
    with pytest.raises(ConfigError, match="with 16: the patches of the model have another size"):
        load_config([of_model, "data.image_patch_size=16"])


def test_verls_default_size_of_patches_is_told_of_where_it_is_not_the_models(tmp_path: Path) -> None:
    path = make_tiny_seeing_model(tmp_path, "qwen3_vl")
    settings = json.loads((path / "config.json").read_text())
    settings["vision_config"]["patch_size"] = 16
    (path / "config.json").write_text(json.dumps(settings))
    of_model = f"actor_rollout_ref.model.path={path}"
    (note,) = [each for each in resolve_config([of_model, "data.image_patch_size=14"]).notes if "patch" in each.key]
    assert "the patches of the model have another size" in note.why
    assert not resolve_config([of_model, "data.image_patch_size=16"]).problems
