"""Compares two checkpoints tensor by tensor, whatever the number of ranks that wrote them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from verl.cli.differences import Compared, Difference
from verl.cli.look import Unusable
from verl.trainer.checkpoints import COMPARED_NBYTES, PARTS, CheckpointDirectory, TrainerState
from verl.utils.config import ConfigError
from verl.utils.file_digests import damaged, noted_in
from verl.workers.engine.checkpoint_files import METADATA_FILE, read_entry, read_metadata

LAST_RATE = re.compile(r"optimizer\.param_groups\.\d+\.lr")
"""The learning rate of the last step in this process: ranks that were started again have none. Each step sets it, from
the number of steps, which is compared."""


def checkpoint_differences(a: Path, b: Path, compared: Compared) -> Iterator[Difference]:
    """Between `global_step_N` directories: the driver's state, then training states, then exported models.

    What only one of them has, as an exported model, is not compared. Parts whose recorded digests are equal are not
    read. Raises Unusable for files that are damaged or no checkpoint's.
    """
    try:
        for path in (a, b):
            for part in PARTS:
                if wrong := (path / part).is_dir() and damaged(path / part, bytes_up_to=COMPARED_NBYTES):
                    raise Unusable(f"the checkpoint {path} is damaged: {wrong}")
        yield from _of_driver(CheckpointDirectory.read(a), CheckpointDirectory.read(b))
        for part in filter(None, PARTS):
            yield from _of_state(part, a / part, b / part, compared)
            yield from _of_exported(part, a / part, b / part, compared)
    except (ConfigError, OSError, ValueError) as exc:
        raise Unusable(str(exc)) from exc


def _of_driver(ours: TrainerState, theirs: TrainerState) -> Iterator[Difference]:
    for name in ("step", "kl_coef", "rewards_before"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            yield _difference(f"trainer.json: {name}", a, b)
    if not _same(ours.dataloader, theirs.dataloader):
        yield _difference("data.pt: the position in the data", "...", "...")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)


def _of_state(part: str, a: Path, b: Path, compared: Compared) -> Iterator[Difference]:
    if not all((path / METADATA_FILE).is_file() for path in (a, b)):
        return
    names = [read_metadata(path).state_dict_metadata.keys() for path in (a, b)]
    if _digests(a) == _digests(b) != {}:
        compared.tensors += len(names[0])
        return
    for name in sorted(name for name in names[0] | names[1] if not LAST_RATE.fullmatch(name)):
        values = [read_entry(path, name) if name in own else None for path, own in zip((a, b), names, strict=True)]
        compared.tensors += 1
        yield from _of_value(f"{part}: {name}", *values)


def _of_exported(part: str, a: Path, b: Path, compared: Compared) -> Iterator[Difference]:
    ours, theirs = _exported(a), _exported(b)
    for name in sorted(ours.keys() | theirs.keys()) if ours and theirs else ():
        values = []
        for files in (ours, theirs):
            tensor = None
            if name in files:
                with _opened(files[name]) as opened:
                    tensor = opened.get_tensor(name)
            values.append(tensor)
        compared.tensors += 1
        yield from _of_value(f"{part}/huggingface: {name}", *values)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except SafetensorError as exc:
        raise ValueError(f"{path} is damaged: {exc}") from exc


def _exported(part: Path) -> dict[str, Path]:
    """The file of each tensor of the exported model."""
    found: dict[str, Path] = {}
    for path in sorted((part / "huggingface").glob("*.safetensors")):
        with _opened(path) as opened:
            found |= dict.fromkeys(opened.keys(), path)
    return found


def _digests(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in noted_in(directory, [""]):
        found |= json.loads(path.read_text("utf-8"))
    return found


def _of_value(what: str, a: Any, b: Any) -> Iterator[Difference]:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        if not _same(a, b):
            yield _difference(what, *(_told(each) for each in (a, b)))
        return
    if a.shape != b.shape or a.dtype != b.dtype:
        yield _difference(what, _told(a), _told(b))
        return
    bits = [each.reshape(-1, 1).contiguous().view(torch.uint8) for each in (a, b) if each.numel()]
    if not bits or torch.equal(*bits):
        return
    differ = (bits[0] != bits[1]).any(dim=1).nonzero().flatten()
    place = int(differ[0])
    values = [each.flatten()[place].item() for each in (a, b)]
    yield _difference(what, *values, place=place, count=len(differ))


def _told(value: Any) -> Any:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else value


def _difference(what: str, a: Any, b: Any, *, place: int | None = None, count: int | None = None) -> Difference:
    return Difference(kind="checkpoint", what=what, a=a, b=b, place=place, count=count)
