import json
import shutil

import pytest

from verl.utils.builtin import make_tiny_model
from verl.utils.config import ConfigError
from verl.utils.model import load_hf_config, load_tokenizer, resolve_model_path
from verl.workers.config import HFModelConfig


def test_a_local_directory_resolves_to_itself(model_dir):
    assert resolve_model_path(str(model_dir)) == model_dir


def test_a_hub_name_is_not_downloaded_and_the_error_says_so():
    with pytest.raises(ConfigError, match=r"'Qwen/Qwen2-7B' is not a directory.*not downloaded.*local directory"):
        resolve_model_path("Qwen/Qwen2-7B")


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", r"has no weights \(\*\.safetensors"),
        ("tokenizer*", "has no tokenizer.*tokenizer_path"),
    ],
)
def test_the_error_says_what_a_model_directory_lacks(model_dir, removed, message):
    for path in model_dir.glob(removed):
        path.unlink()
    with pytest.raises(ConfigError, match=message):
        resolve_model_path(model_dir)


def test_the_tokenizer_may_live_elsewhere(model_dir, tiny_model_dir):
    for path in model_dir.glob("tokenizer*"):
        path.unlink()
    tokenizer = load_tokenizer(HFModelConfig(path=str(model_dir), tokenizer_path=str(tiny_model_dir)))
    assert tokenizer.decode(tokenizer.encode("1+2=")) == "1+2="
    with pytest.raises(ConfigError, match=r"tokenizer_path=.* has no tokenizer"):
        load_tokenizer(HFModelConfig(path=str(tiny_model_dir), tokenizer_path=str(model_dir)))


def test_a_custom_chat_template_replaces_the_tokenizers(tiny_model_dir):
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    tokenizer = load_tokenizer(HFModelConfig(path=str(tiny_model_dir), custom_chat_template=template))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[hi]"


def test_a_tokenizer_without_padding_token_pads_with_its_end_token(model_dir):
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "GPT2Tokenizer"}))
    shutil.copy(make_tiny_model(model_dir.parent / "llama", "llama") / "config.json", model_dir)
    tokenizer = load_tokenizer(HFModelConfig(path=str(model_dir)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 257


def test_override_config_replaces_fields_also_nested_ones(tiny_model_dir):
    override = {"attention_dropout": 0.5, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    model = HFModelConfig(path=str(tiny_model_dir), override_config=override, dropout="keep")
    config = load_hf_config(model)
    assert config.attention_dropout == 0.5
    assert config.rope_parameters["rope_theta"] == 5.0


def test_override_config_refuses_an_unknown_field_with_the_nearest(tiny_model_dir):
    model = HFModelConfig(path=str(tiny_model_dir), override_config={"atention_dropout": 0.0})
    with pytest.raises(ConfigError, match=r"override_config.atention_dropout .*Did you mean 'attention_dropout'"):
        load_hf_config(model)


def test_an_architecture_that_transformers_does_not_know_is_named(model_dir):
    (model_dir / "config.json").write_text('{"model_type": "qwen99"}')
    with pytest.raises(ConfigError, match="qwen99"):
        load_hf_config(HFModelConfig(path=str(model_dir)))


def test_an_external_library_that_is_missing_is_named(tiny_model_dir):
    with pytest.raises(ConfigError, match="external_lib='no_such_library'"):
        load_hf_config(HFModelConfig(path=str(tiny_model_dir), external_lib="no_such_library"))
