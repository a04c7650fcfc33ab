"""Reads a run's output directory for `report` and `trace`. Accepts incomplete files, because runs are killed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from verl.checkpoint_engine.plan.types import SyncReport
from verl.checkpoint_engine.support import records
from verl.checkpoint_engine.support.files import real
from verl.cli.look import Unusable
from verl.trainer.config.record import CONFIG_FILE, RUNS_FILE
from verl.utils.timing import TIMELINE_FILE, Span

METRICS_FILE = "metrics.jsonl"
REPORTS_FILE = "sync_reports.jsonl"
WATCHED = (METRICS_FILE, REPORTS_FILE, TIMELINE_FILE, RUNS_FILE)
"""Files that grow during a run."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The records of a run's files, in file order; empty for missing files."""

    directory: Path
    metrics: Sequence[Mapping[str, Any]]
    """One mapping per step, with its `step`."""
    reports: Sequence[SyncReport]
    spans: Sequence[Span]
    starts: Sequence[Mapping[str, Any]] = ()
    """One mapping per start of the run."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The run's configuration: values by dotted key."""

    @property
    def name(self) -> str:
        return "/".join(self.directory.resolve().parts[-2:])


def read_run(directory: Path) -> RunFiles:
    """Read a run. Raises Unusable for a directory without a run's files, and for an invalid file."""
    try:
        metrics = _read(directory / METRICS_FILE)
        reports = [msgspec.convert(record, SyncReport) for record in _read(directory / REPORTS_FILE)]
        spans = msgspec.convert(_read(directory / TIMELINE_FILE), list[Span])
        starts = read_starts(directory)
        settings = read_settings(directory)
        _require_moments(directory, spans, reports)
    except (OSError, ValueError) as exc:  # msgspec's errors are of the second kind
        raise Unusable(str(exc)) from exc
    if not metrics and not reports and not spans and not starts:
        raise Unusable(f"{directory} has no run: there is none of {', '.join(WATCHED)}")
    return RunFiles(
        directory=directory, metrics=metrics, reports=reports, spans=spans, starts=starts, settings=settings
    )


def read_settings(directory: Path) -> dict[str, Any]:
    """Values by dotted key; empty without a record. Raises ValueError for a file that is no YAML."""
    return dict(_flat(_configuration(directory / CONFIG_FILE)))


def read_starts(directory: Path) -> list[dict[str, Any]]:
    """One record per start of the run. Raises ValueError for a damaged file."""
    return _read(directory / RUNS_FILE)


def _require_moments(directory: Path, spans: Sequence[Span], reports: Sequence[SyncReport]) -> None:
    moments = [moment for span in spans for moment in (span.start_s, span.stop_s)]
    if not all(map(math.isfinite, [*moments, *(report.began_s for report in reports)])):
        raise ValueError(f"{directory}: a moment in {TIMELINE_FILE} or {REPORTS_FILE} is not a number")


def _read(path: Path) -> list[dict[str, Any]]:
    return records.read(path)[0] if path.exists() else []


def _configuration(path: Path) -> Any:
    """Raises ValueError for a file that is no YAML."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    except yaml.YAMLError as exc:
        raise ValueError(f"{path} is no YAML: {str(exc).splitlines()[0]}") from exc


def _flat(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is no section; an empty section is a value."""
    if isinstance(values, Mapping) and values:
        for name, value in values.items():
            yield from _flat(value, f"{key}.{name}" if key else str(name))
    elif key:
        yield key, values


def write_beside(run: RunFiles, output: Path, text: str) -> None:
    """Write `output` with the read permissions of the run, whose data it has. Raises Unusable.

    A file is replaced as a whole, behind a link, too; a device or a pipe is written to.
    """
    known = [run.directory / name for name in WATCHED]
    mode = next(path.stat().st_mode for path in known if path.exists()) & 0o644
    target = real(output)
    partial = target.with_name(f".{target.name}.partial")
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        partial.chmod(mode)
        partial.replace(target)
    except OSError as exc:
        with suppress(OSError):  # whatever kept it from being written, as a read-only disk, may do so again
            partial.unlink()
        raise Unusable(f"cannot write {output}: {exc.strerror}. Name another file with --output") from exc
