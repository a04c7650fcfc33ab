"""Read a Hugging Face model directory: the list of its tensors, and any part of a tensor."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open

from verl.checkpoint_engine.plan.types import Box
from verl.checkpoint_engine.support.finite import extremes, named_extremes
from verl.utils.config import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the name that safetensors has for them."""


class HFCheckpoint:
    """The safetensors files of `directory`, opened on use and closed on leaving the `with` block.

    Raises ConfigError if the directory is not a Hugging Face model with safetensors files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file_of = _files_by_name(directory)
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> HFCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._open.clear()
        self._stack.close()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.shape(name) for name in self._file_of}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._slice(name).get_dtype()]

    def common_dtype(self) -> torch.dtype:
        """The floating-point dtype that most elements have."""
        numel: dict[torch.dtype, int] = {torch.float32: 0}
        for name in self._file_of:
            if (dtype := self.dtype(name)).is_floating_point:
                numel[dtype] = numel.get(dtype, 0) + math.prod(self.shape(name))
        return max(numel, key=numel.__getitem__)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """The elements of `box`, or all, in the dtype of the file; only the bytes of these rows are read.

        Raises ConfigError if they are not all finite: training cannot start from such weights.
        """
        box = box or Box.whole(self.shape(name))
        index = tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))
        values: torch.Tensor = self._slice(name)[index]
        low, high = extremes(values)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ConfigError(
                f"{name} in {self.directory / self._file_of[name]} has {named_extremes(low, high)}: these are no "
                "weights to begin with"
            )
        return values

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self.directory / file, framework="pt", device="cpu"))
        return self._open[file].get_slice(name)


def _files_by_name(directory: Path) -> dict[str, str]:
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model.path={directory} is not a Hugging Face model directory: it has no config.json")
    if (index := directory / INDEX_FILE).is_file():
        return dict(json.loads(index.read_text("utf-8"))["weight_map"])
    if not (directory / SINGLE_FILE).is_file():
        raise ConfigError(
            f"model.path={directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; other formats are not read"
        )
    with safe_open(directory / SINGLE_FILE, framework="pt", device="cpu") as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)
