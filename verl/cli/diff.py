"""`verl-sync diff`: where two runs first differ."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from verl.checkpoint_engine.support import records
from verl.cli.differences import Compared, Difference
from verl.cli.look import SETTINGS, Command
from verl.cli.run_differences import RunToCompare, differing_settings, first_differences, read_run_to_compare

SHOWN = 8
"""The most differences of a kind that are shown without --all."""
WIDEST = 48
"""Characters of a shown value."""
DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(cls=Command, context_settings=SETTINGS)
@click.argument("run_a", metavar="RUN_A", type=DIRECTORY)
@click.argument("run_b", metavar="RUN_B", type=DIRECTORY)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--all", "shows_all", is_flag=True, help="Show every difference of the first step that differs.")
def command(run_a: Path, run_b: Path, as_json: bool, shows_all: bool) -> None:
    """Where two runs first differ.

    RUN_A and RUN_B are output directories. First come settings that differ, then the first step in which samples,
    metrics, or tensors of checkpoints do, bit for bit. Times, throughput, memory, and what else a run measures of its
    machine, are not compared. Samples are, where both runs kept them (trainer.rollout_data_dir, validation_data_dir),
    and checkpoints of steps that both saved.

    Exit code: 0 for equal runs, even if their settings differ; 1 for different ones; 2 for what cannot be compared.
    """
    compared = Compared()
    runs = read_run_to_compare(run_a), read_run_to_compare(run_b)
    found = first_differences(*runs, compared)
    settings = differing_settings(*runs)
    step, differences = found or (None, [])
    if as_json:
        click.echo(records.encoded(_as_data(runs, settings, step, differences, compared)))
    else:
        for line in _lines(runs, settings, step, differences, compared, None if shows_all else SHOWN):
            click.echo(line)
    click.get_current_context().exit(1 if found else 0)


def _as_data(
    runs: tuple[RunToCompare, RunToCompare],
    settings: dict[str, tuple[Any, Any]],
    step: int | None,
    differences: list[Difference],
    compared: Compared,
) -> dict[str, Any]:
    return {
        "equal": step is None,
        "runs": [str(run.directory) for run in runs],
        "settings": {key: list(values) for key, values in settings.items()},
        "step": step,
        "differences": [asdict(each) for each in differences],
        "compared": asdict(compared),
    }


def _lines(
    runs: tuple[RunToCompare, RunToCompare],
    settings: dict[str, tuple[Any, Any]],
    step: int | None,
    differences: list[Difference],
    compared: Compared,
    limit: int | None,
) -> list[str]:
    lines = [
        f"{name}  {run.directory}: {_count(len(run.metrics), 'record')}" for name, run in zip("AB", runs, strict=True)
    ]
    if settings:
        lines.append(f"{_count(len(settings), 'setting')} {'differs' if len(settings) == 1 else 'differ'}, A | B:")
        lines += [f"  {key}  {_short(a)} | {_short(b)}" for key, (a, b) in settings.items()]
    looked = (
        f"{_count(compared.metrics, 'value')} of metrics in {_count(compared.steps, 'record')}, "
        f"{_count(compared.samples, 'sample')}, {_count(compared.tensors, 'value')} of "
        f"{_count(len(compared.checkpoints), 'checkpoint')}"
    )
    if step is None:
        return [*lines, f"equal: {looked}"]
    lines.append(f"step {step} is the first that differs, A | B:")
    for kind in ("samples", "metrics", "checkpoint"):
        of_kind = [each for each in differences if each.kind == kind]
        lines += [f"  {kind}: {_told(each)}" for each in of_kind[:limit]]
        if limit is not None and len(of_kind) > limit:
            lines.append(f"  {kind}: {len(of_kind) - limit} more (--all)")
    return [*lines, f"looked at {looked}"]


def _told(found: Difference) -> str:
    where = "" if found.uid is None else f" (uid {found.uid})"
    if found.place is not None:
        where = f"[{found.place}]{where}"
    if found.count is not None:
        where += f" and {found.count - 1} more" if found.count > 1 else ""
    return f"{found.what}{where}  {_short(found.a)} | {_short(found.b)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _short(value: Any) -> str:
    text = " ".join(("-" if value is None else str(value)).split())
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
