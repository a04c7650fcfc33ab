"""What is wrong with the files of a model is told by file, before anything starts."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from verl.utils.builtin.tokenizer import build_tokenizer
from verl.utils.config import ConfigError
from verl.utils.model import load_hf_config
from verl.utils.model_files import require_embeddings, require_whole_files, weight_tensors
from verl.workers.config import HFModelConfig

KEY = "model.path"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"


@pytest.fixture
def sharded(tmp_path):
    """Two files and their index."""
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(4, np.float32), "c": np.zeros((), np.float32)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    return tmp_path


def write_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_tensors_come_from_one_file_or_from_several(sharded, model_dir):
    assert weight_tensors(sharded, KEY) == {"a": ("F32", (2, 3)), "b": ("F32", (4,)), "c": ("F32", ())}
    weights = load_file(model_dir / "model.safetensors")
    assert weight_tensors(model_dir, KEY) == {name: ("F32", value.shape) for name, value in weights.items()}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_git_lfs_pointer_in_the_place_of_any_file_says_what_to_run(model_dir, name):
    require_whole_files(model_dir, KEY)
    (model_dir / name).write_bytes(POINTER)
    with pytest.raises(ConfigError, match=rf"{KEY}: .*{name} is a git-lfs pointer.*`git lfs pull`"):
        require_whole_files(model_dir, KEY)


def test_a_link_to_a_file_that_was_never_fetched_is_named(model_dir):
    (model_dir / "model.safetensors").unlink()
    (model_dir / "model.safetensors").symlink_to("../blobs/0123")
    with pytest.raises(ConfigError, match="model.safetensors is a link to .*blobs/0123, which does not exist"):
        require_whole_files(model_dir, KEY)


def header(length, text=b""):
    return length.to_bytes(8, "little") + text


ENTRY = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
WRONG = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
DAMAGE = {
    "empty": (lambda whole: b"", "is empty"),
    "a few bytes": (lambda whole: whole[:5], "is truncated: it has 5 bytes"),
    "within the header": (lambda whole: whole[:100], "is truncated: it has 100 bytes"),
    "one byte short": (lambda whole: whole[:-1], r"is truncated: it has \d+ of \d+ bytes"),
    "more than was said": (lambda whole: whole + b"x", "is damaged"),
    "text": (lambda whole: b"<html>" * 9, "is no safetensors file"),
    "an impossible header": (lambda whole: header(2**63), "is no safetensors file"),
    "no JSON": (lambda whole: header(4, b"abcd"), "is no safetensors file"),
    "a list": (lambda whole: header(2, b"[]"), "is no safetensors file"),
    "deep": (lambda whole: header(100_000, b"[" * 100_000), "is no safetensors file"),
    "no offsets": (lambda whole: header(8, b'{"a":{}}'), "is no safetensors file"),
    "no tensor": (lambda whole: header(7, b'{"a":7}'), "is no safetensors file"),
    "a shape of another size": (lambda whole: header(len(WRONG), WRONG + bytes(8)), "is damaged"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_weights_that_are_not_whole_say_so(model_dir, damage, message):
    path = model_dir / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=f"{KEY}: .*model.safetensors {message}"):
        weight_tensors(model_dir, KEY)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one.safetensors", "x": "three.safetensors"}, "lacks three.safetensors, which"),
        ({"a": "two.safetensors"}, "says that two.safetensors has a, and it has not"),
        (None, "is no index of weights"),
        ({"a": 7}, "is no index of weights: TypeError"),
        ([], "is no index of weights"),
    ],
)
def test_an_index_that_does_not_fit_its_files_says_how(sharded, weight_map, message):
    write_index(sharded, weight_map)
    with pytest.raises(ConfigError, match=message):
        weight_tensors(sharded, KEY)


def test_a_truncated_part_of_several_is_named(sharded):
    whole = (sharded / "two.safetensors").read_bytes()
    (sharded / "two.safetensors").write_bytes(whole[:-4])
    with pytest.raises(ConfigError, match=r"two.safetensors is truncated: it has \d+ of \d+ bytes"):
        weight_tensors(sharded, KEY)


def test_weights_that_would_be_unpickled_are_refused_with_the_conversion(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(
        ConfigError, match=r"neither model.safetensors nor .* \.bin files are not read.*save_pretrained"
    ):
        weight_tensors(tmp_path, KEY)


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(model_dir):
    config, tokenizer = load_hf_config(HFModelConfig(path=str(model_dir))), build_tokenizer()
    require_embeddings(tokenizer, config, KEY)
    tokenizer.add_tokens([f"<new-{number}>" for number in range(1 + config.vocab_size - len(tokenizer))])
    with pytest.raises(
        ConfigError, match=rf"for {config.vocab_size} tokens .* 1 ids beyond .* {config.vocab_size} for"
    ):
        require_embeddings(tokenizer, config, KEY)
