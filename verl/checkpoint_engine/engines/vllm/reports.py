"""How workers of an engine tell the process that serves it what they found: vLLM passes neither answers nor the kinds
of errors on. One file for each rank, in a directory that the server names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ...errors import IntegrityError
from ...plan.types import EngineCheckResult


def write_report(directory: Path, rank: int, checked: EngineCheckResult | None, failure: Exception | None) -> None:
    """Called by each worker, at the end of an update."""
    report = {
        "seconds": checked.seconds if checked is not None else None,
        "found": checked.found if checked is not None else None,
        "kept": checked.tensors_kept if checked is not None else 0,
        "differs": failure.message if isinstance(failure, IntegrityError) else None,
    }
    (directory / f"{rank}.json").write_text(json.dumps(report))


def write_names_kept_wide(directory: Path, rank: int, names: Sequence[str]) -> None:
    """Called by each worker that has built a model, once."""
    (directory / f"{rank}.json").write_text(json.dumps(list(names)))


def take_names_kept_wide(directory: Path) -> tuple[str, ...]:
    """What all ranks together keep in float32, sorted. Called once, before anything else is written there."""
    found: set[str] = set()
    for file in directory.glob("*.json"):
        found |= set(json.loads(file.read_text()))
        file.unlink()
    return tuple(sorted(found))


def take_reports(directory: Path, version: int) -> EngineCheckResult | None:
    """What all ranks wrote since it was called last: the longest time, and what the first of them says.

    Raises IntegrityError if one of them computes with anything but `version`.
    """
    reports = []
    for file in sorted(directory.glob("*.json")):
        reports.append((file.stem, json.loads(file.read_text())))
        file.unlink()
    if wrong := [f"rank {rank}: {report['differs']}" for rank, report in reports if report["differs"]]:
        raise IntegrityError("; ".join(wrong), version=version, phase="activate")
    found = [report for _, report in reports if report["seconds"] is not None]
    if not found:
        return None
    return EngineCheckResult(
        seconds=max(report["seconds"] for report in found),
        found=found[0]["found"],
        tensors_kept=min(report["kept"] for report in found),
    )
