"""What the server tells SGLang's ranks, and what each of them answers.

SGLang hands a custom weight loader a list of (name, tensor) and nothing else, and passes no answer back. So an order is
the name of an empty tensor, and answers are files in a directory that the order names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ...errors import ActivationError, ConfigError
from ...plan.types import EngineCheckResult

LOADER = f"{__package__}.loader.load"
"""For SGLang's `custom_weight_loader`, and the `load_format` of an update."""
MOST_NAMED = 5
TensorShapes = Mapping[str, tuple[str, Sequence[int]]]
"""dtype (torch's name) and shape of each tensor of a version."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Load `version` from an arena. Without one, find out what of the checkpoint in `directory` is kept wide, or how
    `tensors` would fit; without any, only say what is held."""

    reports: str
    """The directory for answers."""
    arena_path: str = ""
    version: int = -1
    check: bool = False
    """Find out whether every value of the model came from the version, and every tensor of it went into the model."""
    directory: str = ""
    tensors: dict[str, tuple[str, list[int]]] = {}

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank."""

    seconds: float = 0.0
    failed: str = ""
    """Why the order was not carried out."""
    unfilled: list[str] = []
    """Values of the model, by SGLang's names, that no tensor of the version reached."""
    unread: list[str] = []
    """Tensors of the version that this rank took nothing from."""
    parts: dict[str, int] = {}
    """Of tensors that would be taken in part: how many values this rank would."""
    problems: list[str] = []
    """Why tensors would not be taken, one sentence each."""
    copies: dict[str, str] = {}
    """Of those that are not read: heads, for the model computes with the embedding that each of them goes to."""
    unknown: str = ""
    """Why it cannot be said how tensors would fit."""
    asleep: list[str] = []
    """What of this rank's memory was given back."""
    widened: list[str] = []
    """Tensors whose values the model keeps in float32, though they came in something narrower."""
    version: int | None = None
    """What this rank computes with since its last load; None before the first, and after one that failed."""
    digest: str = ""
    """Of that version."""
    torn: bool = False
    """Whether a load has begun and not ended well: nobody can say what it computes with."""


def write_report(directory: Path, rank: int, report: Report) -> None:
    (directory / f"{rank}.json").write_bytes(msgspec.json.encode(report))


def read_reports(directory: Path) -> dict[int, bytes]:
    """What each rank wrote since it was called last."""
    written = {}
    for file in sorted(directory.glob("*.json")):
        written[int(file.stem)] = file.read_bytes()
        file.unlink()
    return written


def reports_of(written: Mapping[int, bytes], ranks: int) -> dict[int, Report]:
    """What all ranks say. Raises ActivationError with what failed on any, and for a rank that wrote nothing."""
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
    """What is known after `order`. Raises ActivationError if the engine computes with anything else than the version.

    A tensor may be read by some ranks only: experts are divided among them.
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
    """Heads that the model has not, and the embedding that it takes for each: they have to be equal. Raises ConfigError
    for ranks that sleep, ActivationError that lists what does not fit."""
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
    """Of what all ranks hold. Raises ActivationError unless that is `version`, and the same on all."""
    late = [str(rank) for rank, report in reports.items() if report.torn or report.version != version]
    digests = {report.digest for report in reports.values()}
    if late or len(digests) != 1:
        named = f"ranks {', '.join(late)} of SGLang do" if late else "the ranks of SGLang do"
        raise ActivationError(f"{named} not hold the version that they were to load", version=version, phase="activate")
    return digests.pop()


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
