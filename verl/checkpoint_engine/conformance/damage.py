"""Damage to a version's bytes, in its files or in the memory that a pusher shares. No torch."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..parameter_server.checkpoint_directory import checkpoint_files

BIT = 0x04
"""Of the byte with a number's sign: multiplies or divides a bfloat16 or float32 by 256, a float16 by 2."""
MARK_NBYTES = 64
"""Bytes by which a tensor's beginning is found in memory."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where a bit was flipped: in the first element of the tensor that began with these bytes."""

    data: bytes
    itemsize: int


def copied(directory: Path, to: Path) -> Path:
    """A copy, which may be changed, of the checkpoint in `directory`. Its other files are the same ones."""
    import shutil

    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    weights = set(checkpoint_files(directory))
    for file in directory.iterdir():
        if file in weights or file.is_symlink():
            shutil.copyfile(file, to / file.name)
        elif file.is_file():
            (to / file.name).symlink_to(file.resolve())
    return to


def halve(directory: Path) -> None:
    """Cut off the second half of the checkpoint's largest file."""
    largest = max(checkpoint_files(directory), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def flip(directory: Path, shows: Callable[[Path], bool]) -> Mark:
    """Flip a bit of a checkpoint so that `shows(directory)` is true. Raises ConfigError if none shows."""
    for file, begin, itemsize in _matrices(directory):
        with file.open("r+b") as opened:
            opened.seek(begin)
            mark = opened.read(MARK_NBYTES)
            _flip_at(opened.fileno(), begin + itemsize - 1)
            if shows(directory):
                return Mark(data=mark, itemsize=itemsize)
            _flip_at(opened.fileno(), begin + itemsize - 1)
    raise ConfigError(f"no single bit of {directory} shows in log-probs")


def flip_in_memory(files: Iterable[Path], mark: Mark) -> bool:
    """Flip the same bit where `files` have that tensor. Returns whether one has."""
    found = False
    for file in files:
        at = file.read_bytes().find(mark.data)
        if at >= 0:
            with file.open("r+b") as opened:
                _flip_at(opened.fileno(), at + mark.itemsize - 1)
            found = True
    return found


def arena_slots(arena_path: str) -> list[Path]:
    """Files with the bytes of versions."""
    return [file for file in Path(arena_path).glob("slot-*") if file.suffix != ".manifest"]


def _flip_at(handle: int, place: int) -> None:
    (byte,) = os.pread(handle, 1, place)
    os.pwrite(handle, bytes([byte ^ BIT]), place)


def _matrices(directory: Path) -> Iterator[tuple[Path, int, int]]:
    """(file, offset of its first byte, bytes of an element) of each floating-point matrix."""
    for file in checkpoint_files(directory):
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        for name, entry in header.items():
            if name != "__metadata__" and entry["dtype"] in ITEMSIZES and len(entry["shape"]) > 1:
                yield file, 8 + length + entry["data_offsets"][0], ITEMSIZES[entry["dtype"]]


ITEMSIZES = {"F32": 4, "BF16": 2, "F16": 2}
