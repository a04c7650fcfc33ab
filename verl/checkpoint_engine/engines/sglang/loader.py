"""The function that SGLang calls in each of its ranks to load a version: see `orders`.

An exception in a custom weight loader ends SGLang's engine, so none leaves this one: it is told in the report, and the
server, which knows that the weights are torn then, lets nothing be generated from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from ...compat.sglang import among_ranks, asleep, forget_pictures, stay_paused_while
from ...errors import CheckpointEngineError
from ...memory.committed import open_to_activate
from .fit import fit_of
from .flow import Flow
from .orders import Order, Report, TensorShapes, write_report

Weights = Iterable[tuple[str, torch.Tensor]]
_held = Report()
"""What this process computes with, as far as orders have changed it."""


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Execute the order in `named_tensors` on this rank's `model`. Errors of the order go to its report only."""
    ((text, _),) = named_tensors
    order = msgspec.json.decode(text, type=Order)
    stay_paused_while(lambda: _held.torn)
    begin_s = time.perf_counter()
    try:
        report = _carried_out(model, order)
    except Exception as exc:  # noqa: BLE001 - whatever SGLang's loaders raise
        report = Report(failed=exc.message if isinstance(exc, CheckpointEngineError) else _told(exc))
    if order.arena_path:
        _held_by_all()
    held = {name: getattr(_held, name) for name in ("version", "digest", "torn")}
    report = msgspec.structs.replace(report, seconds=time.perf_counter() - begin_s, **held)
    with suppress(OSError):  # who asked is gone, or its disk is full: it misses the report
        write_report(Path(order.reports), torch.distributed.get_rank(), report)


def _carried_out(model: Any, order: Order) -> Report:
    if order.directory:
        return _names_kept_wide(model, Path(order.directory))
    if order.tensors:
        return _how_it_fits(model, order.tensors)
    return _load_version(model, order) if order.arena_path else Report()


def _held_by_all() -> None:
    """What some ranks have loaded and others have not is torn on each: one of them would wait for the others."""
    global _held
    everybody = among_ranks(_held)
    if any(held.torn or held.digest != _held.digest or held.version != _held.version for held in everybody):
        _held = Report(torn=True)


def _how_it_fits(model: Any, tensors: TensorShapes) -> Report:
    if given_back := asleep():
        return Report(asleep=given_back)
    try:
        return fit_of(model, tensors)
    except Exception as exc:  # noqa: BLE001 - whatever SGLang's loaders raise
        return Report(unknown=_told(exc))


def _load_version(model: Any, order: Order) -> Report:
    global _held
    with open_to_activate(order.arena_path, order.version) as (manifest, slot):
        _held, report = Report(torn=True), Report()
        forget_pictures()
        if order.check:
            report = check_while_loading(model, slot.tensors)
        else:
            model.load_weights(slot.tensors())
        if not report.unfilled:
            _held = Report(version=order.version, digest=manifest.digest)
        return report


def check_while_loading(model: Any, weights: Callable[[], Weights]) -> Report:
    """Load `weights`, and report values of the model that no tensor filled and tensors that no loader read.

    All values are NaN before the load, so one that the version does not fill stays NaN. Integers have no NaN: they
    count as unfilled if no loader wrote to them.
    """
    held = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    for tensor in held.values():
        if tensor.dtype.is_floating_point:
            tensor.data.fill_(torch.nan)
    flow = Flow(dict(weights()))
    with flow:
        model.load_weights(iter(weights()))
    unfilled = [name for name, tensor in held.items() if not _is_filled(tensor.data, flow)]
    return Report(unfilled=sorted(unfilled), unread=flow.unread(), widened=flow.widened())


def _is_filled(tensor: torch.Tensor, flow: Flow) -> bool:
    if not tensor.dtype.is_floating_point:
        return flow.wrote(tensor)
    return not bool(torch.isnan(tensor.float()).any()) or flow.brings_nan


def _names_kept_wide(model: Any, directory: Path) -> Report:
    """Which tensors of the checkpoint in `directory` fill values that the model has in float32 among narrower ones."""
    dtypes = {tensor.dtype for tensor in model.parameters() if tensor.dtype.is_floating_point}
    if len(dtypes) == 1 or torch.float32 not in dtypes:
        return Report()
    weights = dict(_tensors_of(directory))  # mapped, not read
    flow = Flow(weights)
    with flow:
        model.load_weights(iter(weights.items()))
    return Report(widened=flow.widened())


def _tensors_of(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    from ...parameter_server.checkpoint_directory import checkpoint_files

    for path in checkpoint_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


def _told(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"
