"""Reports of an engine's workers to the process that serves it, because vLLM passes on neither answers nor types of
errors. Each rank writes a file in a directory that the server names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import IntegrityError
from ...plan.types import EngineCheckResult


def write_report(directory: Path, rank: int, checked: EngineCheckResult | None, failure: Exception | None) -> None:
    """Write the result of an update. Each worker calls it at the end of the update."""
    report = {
        "seconds": checked.seconds if checked is not None else None,
        "found": checked.found if checked is not None else None,
        "kept": checked.tensors_kept if checked is not None else 0,
        "differs": failure.message if isinstance(failure, IntegrityError) else None,
    }
    (directory / f"{rank}.json").write_text(json.dumps(report), "utf-8")


@dataclass(frozen=True)
class Workers:
    """The workers of an engine."""

    kept_wide: tuple[str, ...]
    """Names of the tensors that any worker keeps in float32, sorted."""
    pids: Mapping[int, int]
    """Rank to process id."""


def write_worker(directory: Path, rank: int, kept_wide: Sequence[str]) -> None:
    """Write this worker's pid and wide tensors. Each worker calls it once, after it has built its model."""
    (directory / f"{rank}.json").write_text(json.dumps({"kept_wide": list(kept_wide), "pid": os.getpid()}), "utf-8")


def take_workers(directory: Path) -> Workers:
    """Read and remove the files of `write_worker`. The server calls it once, before any report is written."""
    found = {int(file.stem): json.loads(file.read_text("utf-8")) for file in directory.glob("*.json")}
    for rank in found:
        (directory / f"{rank}.json").unlink()
    kept_wide = {name for worker in found.values() for name in worker["kept_wide"]}
    return Workers(tuple(sorted(kept_wide)), {rank: worker["pid"] for rank, worker in found.items()})


def take_reports(directory: Path, version: int) -> EngineCheckResult | None:
    """Read and remove the reports of all ranks. The result has the longest time and the first rank's text.

    Raises IntegrityError if a rank computes with other values than `version`.
    """
    reports = []
    for file in sorted(directory.glob("*.json")):
        reports.append((file.stem, json.loads(file.read_text("utf-8"))))
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
