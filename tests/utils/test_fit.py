"""Weights that are not all of what a configuration says, or of another one, are named before anything starts."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification

from tests.models.architectures import ARCHITECTURES, FILE, write_checkpoint
from verl.utils.config import ConfigError
from verl.utils.model import load_hf_config, load_tokenizer
from verl.utils.model_files import weight_tensors
from verl.workers.config import HFModelConfig
from verl.workers.engine.fsdp.model import load_hf_config as fsdp_config
from verl.workers.hf.fit import require_fit
from verl.workers.hf.values import register_value_head

KEY = "model.path"


def fit(directory, tensors=None, **more):
    config = load_hf_config(HFModelConfig(path=str(directory)))
    require_fit(config, weight_tensors(directory, KEY) if tensors is None else tensors, KEY, remote=False, **more)


def test_a_gpt_oss_without_its_experts_is_refused(tmp_path):
    write_checkpoint(ARCHITECTURES["gpt_oss"], tmp_path)
    tensors = weight_tensors(tmp_path, KEY)
    fit(tmp_path, tensors)
    without = {tensor: each for tensor, each in tensors.items() if ".experts." not in tensor}
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.experts\.\w+ is not there; .* and \d more$"):
        fit(tmp_path, without)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "gpt2", "phimoe", "mpt"])
def test_a_critic_needs_no_head_of_tokens_but_all_else(name, tmp_path):
    write_checkpoint(ARCHITECTURES[name], tmp_path / "policy")
    fit(tmp_path / "policy", needs_head=False)
    config = load_hf_config(HFModelConfig(path=str(tmp_path / "policy")))
    config.num_labels = 1
    register_value_head(config)
    AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path / "critic")
    weights = load_file(tmp_path / "critic" / FILE)
    assert any("score" in tensor for tensor in weights)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "policy" / file, tmp_path / "critic")
    fit(tmp_path / "critic", needs_head=False)
    with pytest.raises(
        ConfigError, match=r"those of a critic or reward model \(score.*give the policy's own directory"
    ):
        fit(tmp_path / "critic")
    embedding = max(weights, key=lambda tensor: (len(weights[tensor]) > 256, weights[tensor].numel()))
    save_file({each: value for each, value in weights.items() if each != embedding}, tmp_path / "critic" / FILE)
    with pytest.raises(ConfigError, match=f"{embedding} is not there"):
        fit(tmp_path / "critic", needs_head=False)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({}, None),
        ({"vocab_size": 300}, r"embed_tokens.weight: \(300, \d+\) in the model, \(264, \d+\) in the checkpoint"),
        ({"intermediate_size": 100}, r"mlp.gate_proj.weight: \(100, \d+\) in the model"),
        ({"num_hidden_layers": 9}, r"model.layers.\d.* is not there.*more"),
        ({"num_hidden_layers": 1}, r"model.layers.1.* is not in the config's model"),
        ({"hidden_act": "nothing"}, "config.json: transformers knows no hidden_act=nothing"),
    ],
)
def test_a_config_of_another_model_than_the_weights_names_the_tensors(model_dir, override, message):
    config = json.loads((model_dir / "config.json").read_text()) | override
    if "num_hidden_layers" in override:
        config.pop("layer_types", None)
    (model_dir / "config.json").write_text(json.dumps(config))
    if message is None:
        fit(model_dir)
        return
    with pytest.raises(ConfigError, match=message):
        fit(model_dir)


def changed(directory, **fields):
    config = json.loads((directory / "config.json").read_text()) | fields
    (directory / "config.json").write_text(json.dumps(config))
    return HFModelConfig(path=str(directory))


def test_what_transformers_refuses_in_a_configuration_is_told_in_one_line(tmp_path):
    write_checkpoint(ARCHITECTURES["phi3"], tmp_path)
    said = (
        r"config\.json cannot be loaded: .*`rope_parameters`'s type field must be one of \['longrope'\], got dynamic$"
    )
    with pytest.raises(ConfigError, match=said) as refused:
        load_hf_config(changed(tmp_path, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("load", [load_hf_config, fsdp_config])
def test_a_dtype_that_torch_does_not_have_is_told_with_its_word(load, tmp_path):
    write_checkpoint(ARCHITECTURES["qwen2"], tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json cannot be loaded: its dtype 'bf16' is none of torch's"):
        load(changed(tmp_path, dtype="bf16"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"dtype": "bf16"}, "its dtype 'bf16' is none of"), ({"num_hidden_layers": 7}, "`layer_types`")],
)
def test_a_tokenizer_beside_a_configuration_that_cannot_be_loaded_is_told_why(fields, said, model_dir):
    described = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(described | fields))
    with pytest.raises(ConfigError, match=rf"config\.json cannot be loaded: .*{said}"):
        load_tokenizer(HFModelConfig(path=str(model_dir)))


def test_a_value_that_transformers_refuses_is_told_with_its_key(model_dir):
    said = r"model\.override_config\.hidden_size='abc': .* expected int, got str"
    with pytest.raises(ConfigError, match=said) as refused:
        load_hf_config(HFModelConfig(path=str(model_dir), override_config={"hidden_size": "abc"}))
    assert "\n" not in str(refused.value)
