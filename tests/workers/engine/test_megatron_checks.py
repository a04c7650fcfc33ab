from __future__ import annotations

import importlib.util

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.models.architectures import ARCHITECTURES, write_checkpoint
from tests.workers.engine.megatron_cases import tiny_moe
from verl.utils.config import ConfigError
from verl.workers.config import FSDPConfig, HFModelConfig, MegatronConfig
from verl.workers.engine.megatron.checks import check, check_job
from verl.workers.engine.registry import check_engine
from verl.workers.hf.checkpoint import HFCheckpoint


def refusal(path, world=2, hf=None, **options) -> list[str]:
    """The lines of the error. The model of the tests has 4 heads, 2 of them for k and v, and 2 layers."""
    hf_config = AutoConfig.from_pretrained(path)
    for name, value in (hf or {}).items():
        setattr(hf_config, name, value)
    with HFCheckpoint(path) as checkpoint, pytest.raises(ConfigError) as caught:
        check(MegatronConfig(**options), hf_config, world=world, device="cpu", checkpoint=checkpoint)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("world", "options", "parts"),
    [
        (3, {"tensor_model_parallel_size": 2}, [["= 2 does not divide 3 trainer ranks", "n_gpus_per_node"]]),
        (4, {"tensor_model_parallel_size": 4}, [["=4 does not divide", "num_key_value_heads=2"]]),
        (
            3,
            {"tensor_model_parallel_size": 3},
            [["num_attention_heads=4"], ["num_key_value_heads=2"], ["intermediate_"]],
        ),
        (4, {"pipeline_model_parallel_size": 4}, [["=4 cannot cut num_hidden_layers=2", "state the layers"]]),
        (
            2,
            {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 2},
            [["num_layers_in_first_pipeline_stage=2", "at least one"]],
        ),
        (2, {"expert_model_parallel_size": 2}, [["expert_model_parallel_size=2", "no experts"]]),
        (
            2,
            {"override_transformer_config": {"recompute_granularty": "full", "hidden_size": 8, "fp8": "e4m3"}},
            [
                ["recompute_granularty: megatron-core's", "Did you mean 'recompute_granularity'?"],
                ["hidden_size cannot be set", "follows from the checkpoint"],
                ["fp8: layers that compute in fp8", "megatron-core's own"],
            ],
        ),
        (
            2,
            {"override_transformer_config": {"moe_input_jitter_eps": 0.1, "attention_dropout": 0.0}},
            [["moe_input_jitter_eps=0.1, but with actor_rollout_ref.model.dropout=off", "dropout=keep"]],
        ),
        (2, {"padded_vocab_size": 8}, [["padded_vocab_size=8 would cut", "vocab_size="]]),
        (2, {"padded_vocab_size": 1001, "tensor_model_parallel_size": 2}, [["padded_vocab_size=1001", "divided by"]]),
    ],
)
def test_what_cannot_be_cut_is_told_with_both_numbers(models, world, options, parts):
    lines = refusal(models("qwen2"), world, **options)
    assert len(lines) == len(parts)
    for line, expected in zip(lines, parts, strict=True):
        assert [part for part in expected if part not in line] == []


def test_a_critic_is_made_of_a_policy_whose_head_it_does_not_use_and_of_no_other_tensors(models, tmp_path):
    path = models("qwen3")
    config, weights = AutoConfig.from_pretrained(path), load_file(path / "model.safetensors")
    config.save_pretrained(tmp_path)

    def look(tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        with HFCheckpoint(tmp_path) as checkpoint:
            check(MegatronConfig(), config, world=1, device="cpu", checkpoint=checkpoint, labels=1)

    assert "lm_head.weight" in weights
    look(weights)
    look(weights | {"score.weight": torch.zeros(1, config.hidden_size), "score.bias": torch.zeros(1)})
    with pytest.raises(
        ConfigError, match=r"in the checkpoint only: other; shapes: score.bias: \(1,\) in the model, \(2,\)"
    ):
        look(weights | {"score.bias": torch.zeros(2), "other": torch.zeros(2)})


def test_experts_that_cannot_be_dealt_out_are_told(tmp_path):
    path = tiny_moe(tmp_path / "moe")
    (line,) = refusal(path, 3, expert_model_parallel_size=3)
    assert "expert_model_parallel_size=3 does not divide the model's num_experts=4" in line
    (line,) = refusal(path, 2, tensor_model_parallel_size=2)
    assert "sequence_parallel=true" in line
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2}
    first, second = refusal(path, 2, **layout)
    assert "more ranks, or" in first
    assert "unequal numbers of tokens, which gloo" in second
    assert all("expert_tensor_parallel_size=1" in line for line in (first, second))


def test_a_model_without_a_map_is_told_which_have_one_and_how_to_add_it(models):
    (line,) = refusal(models("qwen2"), hf={"model_type": "gemma3"})
    assert all(
        name in line for name in ("'gemma3'", "llama", "qwen2", "qwen3", "qwen3_moe", "architectures.py", "fsdp2")
    )


def test_a_critic_without_a_map_is_told_which_strategy_has_a_value_head_for_it(tmp_path):
    write_checkpoint(ARCHITECTURES["gemma2"], tmp_path)
    with pytest.raises(ConfigError, match=r"critic.strategy=megatron has no map .*'gemma2'.* critic.strategy=fsdp2"):
        check_job(MegatronConfig(), HFModelConfig(path=str(tmp_path)), 1, "cpu", labels=1)


def test_what_the_map_does_not_know_of_a_model_is_told(models):
    (line,) = refusal(models("llama"), hf={"attention_bias": True})
    assert "attention_bias=True, only with False" in line
    (line,) = refusal(models("qwen2"), hf={"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 4.0}})
    assert "yarn" in line


def test_all_tensors_that_do_not_fit_are_named_at_once_with_their_shapes(models, tmp_path):
    source, broken = models("qwen2"), tmp_path / "broken"
    broken.mkdir()
    tensors = load_file(source / "model.safetensors")
    tensors["model.extra.weight"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = torch.zeros(3, 16)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    (broken / "config.json").write_text((source / "config.json").read_text())
    (line,) = refusal(broken)
    assert "in the model only: model.norm.weight;" in line
    assert "in the checkpoint only: model.extra.weight;" in line
    assert "lm_head.weight: (" in line
    assert "(3, 16) in the checkpoint" in line
    assert f"{name}: (32, 16) in the model, (31, 16) in the checkpoint" in line


def test_a_missing_library_names_the_extra(models, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "megatron" else find_spec(name))
    with pytest.raises(ConfigError, match=r"megatron-core.*pip install 'verl-sync\[megatron\]'"):
        check_job(MegatronConfig(), HFModelConfig(path=str(models("qwen2"))), 1, "cpu", 0)


def test_other_engines_are_not_asked(models):
    model = HFModelConfig(path=str(models("qwen2")))
    impossible = MegatronConfig(tensor_model_parallel_size=7)
    options = {"fsdp": FSDPConfig(), "megatron": impossible, "model": model, "world_size": 2, "device": "cpu"}
    check_engine("fsdp2", **options)
    with pytest.raises(ConfigError, match="=7"):
        check_engine("megatron", **options)
