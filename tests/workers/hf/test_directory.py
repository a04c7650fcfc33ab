"""An exported model is the directory that it came from, with other weights."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl.workers.config import HFModelConfig
from verl.workers.hf.directory import write_hf_directory

OTHERS = {
    # transformers loads this combination, warns, and does not save it.
    "generation_config.json": '{"do_sample": false, "temperature": 0.6,\n "eos_token_id": [151645, 151643]}\n',
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": '{"chat_template": "{{ messages }}"}',
    "special_tokens_map.json": "{}",
    "README.md": "# A model\n",
    "LICENSE": "as it is",
    "modeling_own.py": "raise RuntimeError\n",
}
CONFIG = '{"model_type":"llama",   "dtype": "bfloat16", "hidden_size": 4, "rope": {"theta": 1, "kind": "x"}}'


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "source"
    directory.mkdir()
    for name, text in OTHERS.items():
        (directory / name).write_text(text)
    (directory / "config.json").write_text(CONFIG)
    save_file({"old": torch.zeros(1)}, directory / "model-00001-of-00001.safetensors")
    (directory / "model.safetensors.index.json").write_text("{}")
    (directory / "pytorch_model.bin").write_bytes(b"old")
    (directory / ".gitattributes").write_text("")
    (directory / "onnx").mkdir()
    return directory


def export(source, target, *, dtype=None, file_nbytes=10**9, **settings):
    tensors = {name: torch.full((4,), float(index)) for index, name in enumerate("abc")}
    write_hf_directory(
        target,
        dict.fromkeys(tensors, 16),
        lambda name: {name: tensors[name]},
        model_config=HFModelConfig(path=str(source), **settings),
        dtype=dtype,
        file_nbytes=file_nbytes,
    )
    return tensors


def test_every_file_but_the_weights_is_copied_unchanged(source, tmp_path):
    tensors = export(source, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {*OTHERS, "config.json", "model.safetensors"}
    for name, text in {**OTHERS, "config.json": CONFIG}.items():
        assert (tmp_path / "out" / name).read_text() == text
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_config_json_says_what_the_run_overrode_and_nothing_else(source, tmp_path):
    export(
        source,
        tmp_path / "out",
        dtype=torch.float32,
        override_config={"rope": {"theta": 2}, "attn_implementation": "eager"},
    )
    expected = json.loads(CONFIG) | {"dtype": "float32", "rope": {"theta": 2, "kind": "x"}}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == expected


def test_another_chat_template_and_another_tokenizer_are_those_of_the_run(source, tmp_path):
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text('{"version": "2.0"}')
    (other / "config.json").write_text("{}")
    (source / "chat_template.json").write_text('{"chat_template": "of the processor"}')
    (source / "processor_config.json").write_text('{"chat_template": "of the processor", "image_seq_length": 4}')
    export(source, tmp_path / "out", tokenizer_path=str(other), custom_chat_template="{{ own }}")
    assert not (tmp_path / "out" / "chat_template.json").exists()
    assert json.loads((tmp_path / "out" / "processor_config.json").read_text()) == {"image_seq_length": 4}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "2.0"}'
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ own }}"
    assert (tmp_path / "out" / "config.json").read_text() == CONFIG


def test_files_are_no_larger_than_asked_and_an_index_finds_the_tensors(source, tmp_path):
    export(source, tmp_path / "out", file_nbytes=32)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 48},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    }
