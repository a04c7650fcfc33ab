import json
import shutil

import pytest

from tests.seeing import make_seeing
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


PROCESSORS_TEMPLATES = {
    "chat_template.json": {"chat_template": "{% for message in messages %}<{{ message.content }}>{% endfor %}"},
    "processor_config.json": {"chat_template": "{% for message in messages %}({{ message.content }}){% endfor %}"},
}


@pytest.mark.parametrize("files", [(), ("chat_template.json",), ("processor_config.json",), (*PROCESSORS_TEMPLATES,)])
def test_a_template_of_the_processor_goes_before_the_tokenizers_as_in_transformers(files, tmp_path):
    from transformers import AutoProcessor

    model = make_seeing(tmp_path / "model", "llava")
    for name in files:
        described = json.loads((model / name).read_text()) if (model / name).exists() else {}
        (model / name).write_text(json.dumps(described | PROCESSORS_TEMPLATES[name]))
    found = load_tokenizer(HFModelConfig(path=str(model)))
    conversation = [{"role": "user", "content": "hi"}]
    processor = AutoProcessor.from_pretrained(model)
    expected = (processor if files else processor.tokenizer).apply_chat_template(conversation, tokenize=False)
    assert found.apply_chat_template(conversation, tokenize=False) == expected
    given = load_tokenizer(HFModelConfig(path=str(model), custom_chat_template="{{ own }}"))
    assert given.chat_template == "{{ own }}"


def test_a_template_of_a_processor_that_cannot_be_read_is_refused(tmp_path):
    model = make_seeing(tmp_path / "model", "llava")
    (model / "chat_template.json").write_text("{")
    with pytest.raises(ConfigError, match="the chat template of the processor in .* cannot be loaded"):
        load_tokenizer(HFModelConfig(path=str(model)))


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
