"""Checks whether the files of a model are complete. The driver calls it before any process starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from verl.utils.config import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name to dtype (in safetensors' notation) and shape."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GIT_LFS = b"version https://git-lfs.github.com/spec/"
SHOWN = 3
_HEADER_SIZE = 8
_LARGEST_HEADER = 100 << 20
"""As the library has it."""


def require_whole_files(directory: Path, key: str) -> None:
    """Raises ConfigError for a placeholder of a file in `directory` (of `key`): a git-lfs pointer, or a link to a
    missing file, which incomplete downloads leave."""
    for path in sorted(directory.iterdir()):
        if path.is_symlink() and not path.exists():
            raise ConfigError(f"{key}: {path} is a link to {path.readlink()}, which does not exist")
        if path.is_file() and _beginning(path, len(GIT_LFS)) == GIT_LFS:
            raise ConfigError(f"{key}: {path} is a git-lfs pointer, not the file: run `git lfs pull` in {directory}")


def weight_tensors(directory: Path, key: str) -> Tensors:
    """All tensors in the safetensors files of `directory`, from their headers alone.

    Raises ConfigError for weights in another format, a file that is missing, truncated or damaged, and an index that
    names tensors which its files do not have.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        if (directory / SINGLE_FILE).is_file():
            return _header(directory / SINGLE_FILE, key)
        raise ConfigError(f"{key}={directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{_other_weights(directory)}")
    try:
        file_of: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        files = sorted(set(file_of.values()))
        "".join(files)  # TypeError unless they are texts
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ConfigError(f"{key}: {index} is no index of weights: {type(exc).__name__}: {exc}") from exc
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise ConfigError(f"{key}={directory} lacks {_some(missing)}, which {INDEX_FILE} names")
    held = {file: _header(directory / file, key) for file in files}
    absent = [name for name, file in file_of.items() if name not in held[file]]
    if absent:
        raise ConfigError(
            f"{key}: {INDEX_FILE} says that {file_of[absent[0]]} has {_some(absent)}, and it has not: the files are "
            "of different models"
        )
    return {name: held[file][name] for name, file in file_of.items()}


def require_embeddings(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, key: str) -> None:
    """Raises ConfigError for a tokenizer with ids beyond the rows of the model's embedding."""
    vocabulary = tokenizer.get_vocab()
    rows = config.get_text_config().vocab_size
    beyond = sorted((number, token) for token, number in vocabulary.items() if number >= rows)
    if beyond:
        number, token = beyond[0]
        raise ConfigError(
            f"{key} has embeddings for {rows} tokens (vocab_size), and its tokenizer {len(beyond)} ids beyond them, "
            f"such as {number} for {token!r}: the model and the tokenizer do not belong together"
        )


def _header(path: Path, key: str) -> Tensors:
    from safetensors import SafetensorError, safe_open

    size = path.stat().st_size
    length = int.from_bytes(_beginning(path, _HEADER_SIZE), "little")
    if not size:
        raise ConfigError(f"{key}: {path} is empty")
    if size < _HEADER_SIZE or _HEADER_SIZE + length > size and length <= _LARGEST_HEADER:
        raise ConfigError(f"{key}: {path} is truncated: it has {size} bytes, and its header is longer")
    with path.open("rb") as file:
        file.seek(_HEADER_SIZE)
        try:
            header = json.loads(file.read(length) if length <= _LARGEST_HEADER else b"")
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            needed = _HEADER_SIZE + length + max((int(each["data_offsets"][1]) for each in entries.values()), default=0)
            tensors = {name: (str(each["dtype"]), tuple(map(int, each["shape"]))) for name, each in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as exc:
            raise ConfigError(f"{key}: {path} is no safetensors file: {type(exc).__name__}: {exc}") from exc
    if size < needed:
        raise ConfigError(f"{key}: {path} is truncated: it has {size} of {needed} bytes")
    try:
        with safe_open(path, framework="np"):
            return tensors
    except SafetensorError as exc:
        raise ConfigError(f"{key}: {path} is damaged: {exc}") from exc


def _other_weights(directory: Path) -> str:
    if any(directory.glob("consolidated*.safetensors")):
        return (
            ". Its consolidated*.safetensors are in Mistral's own format, which is not read: give the "
            "model*.safetensors that most such repositories have beside them, or a converted version of the model"
        )
    if not any(directory.glob("*.bin")):
        return "; other formats are not read"
    return (
        '. Its .bin files are not read, since that would run code in them. If you trust them: `python -c "from '
        f"transformers import AutoModelForCausalLM as M; M.from_pretrained('{directory}').save_pretrained('NEW')\"` "
        "writes safetensors"
    )


def _beginning(path: Path, length: int) -> bytes:
    with path.open("rb") as file:
        return file.read(length)


def _some(items: list[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more
