"""Orders to SGLang's ranks, and their reports.

SGLang calls a custom weight loader with a list of (name, tensor) only, and returns no answer. So an order is the name
of an empty tensor, and reports are files in a directory that the order names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ...errors import ActivationError, ConfigError
from ...plan.types import EngineCheckResult

LOADER = f"{__package__}.loader.load"
"""The value of SGLang's `custom_weight_loader`, and the `load_format` of an update."""
MOST_NAMED = 5
TensorShapes = Mapping[str, tuple[str, Sequence[int]]]
"""Tensor name to (dtype by torch's name, shape), for a version."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """An order to load `version` from `arena_path`, to list tensors of the checkpoint in `directory` that the model
    keeps in float32, or to check how `tensors` fit. With none of them a rank only reports its version."""

    reports: str
    """The directory for reports."""
    arena_path: str = ""
    version: int = -1
    check: bool = False
    """Check that the version fills every value of the model, and that loaders read all its tensors."""
    directory: str = ""
    tensors: dict[str, tuple[str, list[int]]] = {}

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one rank."""

    seconds: float = 0.0
    failed: str = ""
    """Why the order failed; empty if it did not."""
    unfilled: list[str] = []
    """Tensors of the model, by SGLang's names, with values that no tensor of the version filled."""
    unread: list[str] = []
    """Tensors of the version that this rank did not read."""
    parts: dict[str, int] = {}
    """Tensors that this rank would read in part, with the number of values."""
    problems: list[str] = []
    """Why the model would refuse tensors, one sentence each."""
    copies: dict[str, str] = {}
    """Unread heads, each with the embedding that the model uses instead."""
    unknown: str = ""
    """Why this rank cannot check how tensors fit; empty if it can."""
    asleep: list[str] = []
    """Tags of this rank's memory that sleeps."""
    widened: list[str] = []
    """Tensors that arrived in a narrower dtype than the float32 in which the model keeps them."""
    version: int | None = None
    """The version of the last load; None before the first, and after a failed one."""
    digest: str = ""
    """The digest of that version."""
    torn: bool = False
    """Whether a load has begun and not succeeded, so that the weights may be mixed."""


def write_report(directory: Path, rank: int, report: Report) -> None:
    (directory / f"{rank}.json").write_bytes(msgspec.json.encode(report))


def read_reports(directory: Path) -> dict[int, bytes]:
    """Read and remove the reports in `directory`: rank to bytes."""
    written = {}
    for file in sorted(directory.glob("*.json")):
        written[int(file.stem)] = file.read_bytes()
        file.unlink()
    return written


def reports_of(written: Mapping[int, bytes], ranks: int) -> dict[int, Report]:
    """Decode all reports. Raises ActivationError with the failures of ranks, and for a rank without a report."""
    try:
        reports = {rank: msgspec.json.decode(text, type=Report) for rank, text in written.items()}
    except msgspec.DecodeError as exc:
        raise ActivationError(f"the report of a rank of SGLang cannot be decoded: {exc}") from exc
    if failed := [f"rank {rank}: {report.failed}" for rank, report in reports.items() if report.failed]:
        raise ActivationError("; ".join(failed))
    if silent := sorted(set(range(ranks)) - reports.keys()):
        raise ActivationError(f"rank {', '.join(map(str, silent))} of SGLang did not load it and reported no reason")
    return reports


def checked(reports: dict[int, Report], order: Order) -> EngineCheckResult | None:
    """The result of the check in `order`. Raises ActivationError if the engine computes with other values.

    It is enough that one rank reads a tensor: experts are divided among ranks.
    """
    if not order.check:
        return None
    problems = [
        f"rank {rank}: no tensor fills {_named(report.unfilled)}" for rank, report in reports.items() if report.unfilled
    ]
    if unread := set.intersection(*(set(report.unread) for report in reports.values())):
        problems.append(f"the model takes nothing from {_named(sorted(unread))}")
    if widened := sorted({name for report in reports.values() for name in report.widened}):
        problems.append(f"SGLang keeps {_named(widened)} in float32, but they came rounded: set rollout.dtype=float32")
    if problems:
        raise ActivationError("; ".join(problems), version=order.version, phase="activate")
    return EngineCheckResult(
        seconds=max(report.seconds for report in reports.values()),
        found="every value of the model came from the version, and every tensor of it was taken",
    )


def fitted(reports: dict[int, Report], tensors: TensorShapes) -> dict[str, str]:
    """Heads that the model lacks, each with the embedding that it uses instead: their values must be equal. Raises
    ConfigError for ranks that sleep, ActivationError listing the tensors that do not fit."""
    if asleep := sorted({tag for report in reports.values() for tag in report.asleep}):
        raise ConfigError(f"it sleeps ({', '.join(asleep)}): wake it up first (POST /resume_memory_occupation)")
    copies = {name: twin for report in reports.values() for name, twin in report.copies.items()}
    unread = set.intersection(*(set(report.unread) for report in reports.values())) - copies.keys()
    problems = [problem for report in reports.values() for problem in report.problems]
    problems += [f"no tensor fills {name}" for report in reports.values() for name in report.unfilled]
    problems += [f"it takes nothing from {name} {[*tensors[name][1]]}" for name in sorted(unread)]
    for name in sorted({name for report in reports.values() for name in report.parts}):
        numel = math.prod(tensors[name][1])
        taken = sum(0 if name in report.unread else report.parts.get(name, numel) for report in reports.values())
        if taken < numel:
            problems.append(f"it takes a part of {name} {[*tensors[name][1]]} and leaves the rest")
    problems += [
        f"{name} is {tensors[name][0]}, and SGLang keeps it in float32: send it in that"
        for name in sorted({name for report in reports.values() for name in report.widened})
    ]
    if problems := list(dict.fromkeys(problems)):
        raise ActivationError(
            f"the weights do not fit the engine's model, {len(problems)} problems: {'; '.join(problems)}"
        )
    return copies


def held_digest(reports: dict[int, Report], version: int) -> str:
    """The digest that all ranks report. Raises ActivationError unless all hold `version` with the same digest."""
    late = [str(rank) for rank, report in reports.items() if report.torn or report.version != version]
    digests = {report.digest for report in reports.values()}
    if late or len(digests) != 1:
        named = f"ranks {', '.join(late)} of SGLang do" if late else "the ranks of SGLang do"
        raise ActivationError(f"{named} not hold the version that they were to load", version=version, phase="activate")
    return digests.pop()


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
