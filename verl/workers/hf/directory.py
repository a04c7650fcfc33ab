"""Write a Hugging Face model directory: a copy of the model's own with new weights."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from verl.checkpoint_engine.support.files import sync_to_disk
from verl.utils.disk import full_disk_told, require_space
from verl.utils.first_rank import FirstRank
from verl.utils.model import ATTENTION
from verl.workers.config import HFModelConfig
from verl.workers.hf.checkpoint import INDEX_FILE, SINGLE_FILE

FILE_NBYTES = 5 * 10**9
WEIGHTS = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.h5", "*.msgpack"),
    *("*.gguf", "*.onnx", "*.ckpt", "consolidated.*"),
)
TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.jinja")
TEMPLATE_FILE = "chat_template.jinja"
"""It has precedence over the template in `tokenizer_config.json`."""


def write_hf_directory(
    directory: Path,
    nbytes: Mapping[str, int],
    collect: Callable[[str], Mapping[str, torch.Tensor]],
    *,
    model_config: HFModelConfig,
    dtype: torch.dtype | None,
    own_config: PretrainedConfig | None = None,
    file_nbytes: int = FILE_NBYTES,
) -> None:
    """Write the directory `model_config.path` with other weights. Its other files are copied as they are.

    `collect` is a collective that is called once for every key of `nbytes`, in order, so rank 0 holds no more than one
    file of about `file_nbytes`. It gives, on rank 0, whole CPU tensors under the names that they have in the file; what
    it gives elsewhere does not matter. A `dtype` that the weights were cast to is written to `config.json`, as are
    fields that the run overrides; `own_config` is written in its place for a model that is another one.

    A collective; everything is synced to disk when it returns. What goes wrong on rank 0, which writes, is raised on
    every rank, when all have come to the end: DiskFull, if possible before anything is written.
    """
    needed = sum(nbytes.values())
    with FirstRank() as first:
        first.do(lambda: require_space(directory, needed))
    groups = list(_files(nbytes, file_nbytes))
    weight_map: dict[str, str] = {}
    total = 0
    with full_disk_told(directory, needed), FirstRank() as first:
        first.do(lambda: directory.mkdir(parents=True, exist_ok=True))
        for index, keys in enumerate(groups, start=1):
            file = SINGLE_FILE if len(groups) == 1 else f"model-{index:05d}-of-{len(groups):05d}.safetensors"
            content = {name: full for key in keys for name, full in collect(key).items()}
            weight_map |= dict.fromkeys(content, file)
            total += sum(full.nbytes for full in content.values())
            first.do(partial(save_file, content, directory / file, metadata={"format": "pt"}))
        if len(groups) > 1:
            index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
            first.do(lambda: (directory / INDEX_FILE).write_text(index_text, "utf-8"))
        first.do(lambda: _copy_other_files(directory, model_config))
        if own_config is not None:
            first.do(lambda: own_config.save_pretrained(directory))
        else:
            first.do(lambda: _write_config(directory / "config.json", model_config.override_config, dtype))
        first.do(lambda: sync_to_disk(directory))


def _files(nbytes: Mapping[str, int], file_nbytes: int) -> Iterator[list[str]]:
    """Keys in runs of at most `file_nbytes`, or one if that is larger."""
    keys: list[str] = []
    size = 0
    for key, own in nbytes.items():
        if keys and size + own > file_nbytes:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += own
    yield keys


def _copy_other_files(directory: Path, model_config: HFModelConfig) -> None:
    source = Path(model_config.path)
    for file in source.iterdir():
        if file.is_file() and not _matches(file.name, WEIGHTS) and not file.name.startswith("."):
            shutil.copyfile(file, directory / file.name)
    if model_config.tokenizer_path:
        for file in Path(model_config.tokenizer_path).iterdir():
            if file.is_file() and _matches(file.name, TOKENIZER):
                shutil.copyfile(file, directory / file.name)
    if model_config.custom_chat_template:
        (directory / TEMPLATE_FILE).write_text(model_config.custom_chat_template, "utf-8")
        _drop_other_templates(directory)


def _drop_other_templates(directory: Path) -> None:
    """Those of a processor, which go before `TEMPLATE_FILE`."""
    (directory / "chat_template.json").unlink(missing_ok=True)
    described = directory / "processor_config.json"
    if described.is_file() and "chat_template" in (fields := json.loads(described.read_text("utf-8"))):
        del fields["chat_template"]
        described.write_text(json.dumps(fields, indent=2) + "\n", "utf-8")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _write_config(file: Path, overrides: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    """The text stays as it is if nothing in it changes."""
    config = json.loads(file.read_text("utf-8"))
    before = json.dumps(config)
    _merge(config, {key: value for key, value in overrides.items() if key != ATTENTION})
    if dtype is not None:
        config["torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"] = _dtype_name(dtype)
    if json.dumps(config) != before:
        file.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _merge(config: dict[str, Any], fields: Mapping[str, Any]) -> None:
    for key, value in fields.items():
        if isinstance(value, Mapping) and isinstance(config.get(key), dict):
            _merge(config[key], value)
        else:
            config[key] = value


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
