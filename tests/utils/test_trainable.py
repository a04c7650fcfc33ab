"""What cannot be trained by its kind is refused in a sentence: before a run, and where a trainer loads it."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tests.models.architectures import ARCHITECTURES, write_checkpoint
from tests.workers.engine.engine_cases import make_engine
from verl.trainer.config.checking import on_its_device
from verl.trainer.config.loader import load_config
from verl.trainer.main_ppo import check_ppo
from verl.utils.config import ConfigError
from verl.utils.device import any_device
from verl.utils.model import load_hf_config, resolve_model_path
from verl.utils.model_files import weight_tensors
from verl.utils.trainable import require_trainable
from verl.workers.config import HFModelConfig
from verl.workers.engine.fsdp.model import load_hf_config as load_in_engine
from verl.workers.hf.fit import require_fit

KEY = "model.path"
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*_SIZES, *(-size for size in _SIZES)])
"""What four bits stand for (OCP Microscaling Formats, 5.3.3)."""
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.fixture
def model_dir(tiny_model_dir, tmp_path):
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


def rewrite(directory, **fields) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | fields))


def refusals(directory) -> list[str]:
    """Of the driver, and of a trainer's engine."""
    model = HFModelConfig(path=str(directory))
    with pytest.raises(ConfigError) as before:
        require_fit(load_hf_config(model), weight_tensors(directory, KEY), KEY, remote=False)
    with pytest.raises(ConfigError) as loading:
        load_in_engine(model)
    return [str(before.value), str(loading.value)]


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("fp8", "FineGrainedFP8Config(dequantize=True)"),
        ("mxfp4", "Mxfp4Config(dequantize=True)"),
        ("bitsandbytes", ".dequantize()"),
        ("gptq", "the checkpoint that they were made of"),
        ("awq", "the checkpoint that they were made of"),
        ("compressed-tensors", "the checkpoint that they were made of"),
    ],
)
def test_a_config_of_quantised_weights_is_told_with_what_to_do(model_dir, method, remedy):
    rewrite(model_dir, quantization_config={"quant_method": method})
    for refusal in refusals(model_dir):
        assert f"the weights are quantised ({method})" in refusal
        assert remedy in refusal
        assert len(refusal.splitlines()) == 1


def test_the_check_of_a_run_tells_it_once(model_dir, tmp_path):
    rewrite(model_dir, quantization_config={"quant_method": "gptq"})
    config = [f"actor_rollout_ref.model.path={model_dir}", f"trainer.default_local_dir={tmp_path}"]
    with any_device():
        checked = check_ppo(on_its_device(load_config(config)))
    assert len([problem for problem in checked.problems if "quantised" in problem]) == 1


def test_quantised_weights_below_a_nested_config_are_told(model_dir):
    config = load_hf_config(HFModelConfig(path=str(model_dir)))
    config.text_config = AutoConfig.for_model("llama", quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(ConfigError, match=r"quantised \(compressed-tensors\)"):
        require_trainable(config, KEY)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("model.layers.0.mlp.up_proj.weight_scale_inv", "fp8"),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", "mxfp4"),
        ("model.layers.0.mlp.up_proj.qweight", "gptq or awq"),
        ("model.layers.0.mlp.up_proj.weight_packed", "compressed-tensors"),
        ("model.layers.0.mlp.up_proj.weight.absmax", "bitsandbytes"),
        ("model.layers.0.mlp.up_proj.weight_scale_2", "modelopt"),
    ],
)
def test_quantised_weights_whose_config_does_not_say_so_are_told_by_their_tensors(model_dir, name, method):
    config, tensors = load_hf_config(HFModelConfig(path=str(model_dir))), weight_tensors(model_dir, KEY)
    with pytest.raises(ConfigError, match=rf"quantised \({method}\)"):
        require_fit(config, tensors | {name: ("F32", (1, 1))}, KEY, remote=False)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=["I8", "U8", "F8_E4M3"])
def test_weights_that_are_no_numbers_of_16_bits_or_more_are_told_by_their_dtype(request, model_dir, dtype):
    weights = load_file(model_dir / "model.safetensors")
    name = next(name for name in weights if name.endswith("up_proj.weight"))
    save_file(weights | {name: weights[name].to(dtype)}, model_dir / "model.safetensors", {"format": "pt"})
    config, tensors = load_hf_config(HFModelConfig(path=str(model_dir))), weight_tensors(model_dir, KEY)
    with pytest.raises(ConfigError, match=rf"quantised \({request.node.callspec.id}: {name}\)"):
        require_fit(config, tensors, KEY, remote=False)


def test_adapters_beside_the_weights_are_not_left_out_without_a_word(model_dir):
    config, tensors = load_hf_config(HFModelConfig(path=str(model_dir))), weight_tensors(model_dir, KEY)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    with pytest.raises(ConfigError, match=r"adapters are beside the weights .*merge_and_unload"):
        require_fit(config, tensors | {name: ("F32", (2, 64))}, KEY, remote=False)


def test_a_directory_of_adapters_and_one_of_gguf_are_told_what_to_give_instead(model_dir):
    (model_dir / "model.safetensors").rename(model_dir / "model-Q4_K_M.gguf")
    with pytest.raises(ConfigError, match="GGUF, which is quantised, is not read: give the checkpoint"):
        resolve_model_path(model_dir)
    (model_dir / "config.json").rename(model_dir / "adapter_config.json")
    with pytest.raises(ConfigError, match="holds adapters alone: give a merged copy, .*merge_and_unload"):
        resolve_model_path(model_dir)


def test_mistrals_own_format_is_told_what_to_give_instead(model_dir):
    (model_dir / "model.safetensors").rename(model_dir / "consolidated-00001-of-00001.safetensors")
    with pytest.raises(ConfigError, match=r"in Mistral's own format, which is not read: give the model\*.safetensors"):
        weight_tensors(resolve_model_path(model_dir), KEY)
    (model_dir / "config.json").rename(model_dir / "params.json")
    with pytest.raises(ConfigError, match=r"format of its authors \(params.json\): give the Hugging Face version"):
        resolve_model_path(model_dir)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, r"model type `unheard` but Transformers does not recognize this architecture \(transformers [\d.]+\)$"),
        ({"auto_map": {"AutoConfig": "own.Config"}}, "code of its own .* run with trust_remote_code=true"),
    ],
)
def test_a_model_that_transformers_does_not_know_is_one_short_line(model_dir, fields, told):
    rewrite(model_dir, model_type="unheard", **fields)
    with pytest.raises(ConfigError, match=told):
        load_hf_config(HFModelConfig(path=str(model_dir)))


def test_an_engine_tells_them_by_their_tensors_too(model_dir):
    weights = load_file(model_dir / "model.safetensors")
    name = next(name for name in weights if name.endswith("up_proj.weight"))
    save_file(weights | {f"{name}_scale_inv": torch.ones(1, 1)}, model_dir / "model.safetensors", {"format": "pt"})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match=r"quantised \(fp8\)"):
            make_engine(model_dir)
    finally:
        dist.destroy_process_group()


def follow(refusal: str, directory, new) -> None:
    """Do what it says, and keep the tokenizer."""
    (command,) = re.findall(r"`(AutoModel.*)` of transformers", refusal)
    imports = "from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config"
    exec(f"{imports}\n{command}", {"PATH": directory, "NEW": new})
    for file in directory.glob("tokenizer*"):
        shutil.copy(file, new)


def is_taken(directory) -> None:
    """By the driver and by an engine."""
    model = HFModelConfig(path=str(directory))
    require_fit(load_hf_config(model), weight_tensors(directory, KEY), KEY, remote=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        make_engine(directory)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_what_the_refusal_of_fp8_says_to_run_makes_a_model_that_is_taken(tmp_path, name):
    directory, new = tmp_path / "quantised", tmp_path / "new"
    write_checkpoint(ARCHITECTURES[name], directory)
    right = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    weights = load_file(directory / "model.safetensors")
    found = {}
    for tensor, weight in weights.items():
        found[tensor] = weight
        if tensor.endswith("_proj.weight"):
            found[tensor] = (weight.float() / 2).to(torch.float8_e4m3fn)
            found[f"{tensor}_scale_inv"] = torch.full([-(-size // 128) for size in weight.shape], 2.0)
    save_file(found, directory / "model.safetensors", {"format": "pt"})
    rewrite(directory, quantization_config=FP8)
    follow(refusals(directory)[0], directory, new)
    is_taken(new)
    written = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32).state_dict()
    assert written.keys() == right.keys()
    for tensor, weight in right.items():
        assert (written[tensor] - weight).norm() <= 0.05 * weight.norm(), tensor


def test_what_the_refusal_of_mxfp4_says_to_run_makes_a_model_that_is_taken(tmp_path):
    directory, new = tmp_path / "quantised", tmp_path / "new"
    write_checkpoint(ARCHITECTURES["gpt_oss"], directory)
    weights, right = load_file(directory / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = weights.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, blocks.shape[:-1], dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        pairs = torch.stack([E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]], -1).flatten(-2)
        right[name] = (pairs * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    rewrite(directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    follow(refusals(directory)[0], directory, new)
    is_taken(new)
    written = load_file(new / "model.safetensors")
    assert len(right) == 4
    assert [name for name, weight in right.items() if not torch.equal(written[name].float(), weight)] == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("aya_vision", "also takes images"),
        ("idefics3", "also takes images"),
        # transformers has a causal language model for this one, too
        ("gemma3n", "also takes images and audio"),
        ("phi4_multimodal", "also takes images and audio"),
        ("fuyu", "also takes images"),
        ("emu3", "also takes images"),
        ("moshi", "also takes audio"),
        ("qwen2_audio", "also takes audio"),
        ("qwen2_5_omni", "also takes audio and images"),
        ("whisper", "is an encoder with a decoder"),
        ("bart", "is an encoder with a decoder"),
        ("t5", "is an encoder with a decoder"),
        ("vit", "is no causal language model"),
        ("bert", "also looks at the tokens behind one"),
        ("xlm-roberta", "also looks at the tokens behind one"),
        ("xlnet", "also looks at the tokens behind one"),
    ],
)
def test_models_of_another_kind_are_refused_in_a_sentence(model_dir, kind, said):
    CONFIG_MAPPING[kind]().save_pretrained(model_dir)
    for refusal in refusals(model_dir):
        assert said in refusal
        assert kind in refusal
        assert len(refusal) < 350


@pytest.mark.parametrize("kind", ["prophetnet", "bart", "marian"])
def test_the_decoder_of_a_model_with_an_encoder_is_refused_in_a_sentence(model_dir, kind):
    CONFIG_MAPPING[kind](is_encoder_decoder=False, is_decoder=True).save_pretrained(model_dir)
    assert all("is the decoder of a model with an encoder" in refusal for refusal in refusals(model_dir))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"is_causal": False}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("gemma3", {"text_config": {"use_bidirectional_attention": True}}),
    ],
)
def test_attention_to_later_tokens_is_refused(model_dir, kind, fields):
    CONFIG_MAPPING[kind](**fields).save_pretrained(model_dir)
    assert all("also looks at the tokens behind one" in refusal for refusal in refusals(model_dir))
