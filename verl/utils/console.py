"""What a run shows on the terminal: a progress bar, one line per step, a summary at the end."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

FIELDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("critic/score/mean", "critic/rewards/mean"), "{:.3f}"),
    ("response", ("response_length/mean",), "{:.1f} tok"),
    ("probs diff", ("training/rollout_probs_diff_mean",), "{:.4f}"),
    ("kl", ("actor/kl_loss", "actor/reward_kl_penalty"), "{:.4f}"),
    ("entropy", ("actor/entropy",), "{:.3f}"),
    ("grad", ("actor/grad_norm",), "{:.2f}"),
    ("gen", ("timing_s/gen",), "{:.1f} s"),
    ("update", ("timing_s/update_actor",), "{:.1f} s"),
    ("sync", ("timing_s/update_weights",), "{:.2f} s"),
)
"""Label, metrics of which the first that is there is shown, format."""


def validation_rewards(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Held-out mean reward by data source, out of the metrics of one step; empty if it was not validated."""
    prefix, infix = "val-core/", "/reward/mean@"
    return {
        name[len(prefix) :].rpartition(infix)[0]: value
        for name, value in metrics.items()
        if name.startswith(prefix) and infix in name and value is not None
    }


def step_line(metrics: Mapping[str, float], step: int, total_steps: int | None) -> str:
    """The step in one readable line of plain text; what was not measured is left out."""
    parts = [f"step {step}" if total_steps is None else f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    for label, names, pattern in FIELDS:
        name = next((name for name in names if name in metrics), None)
        if name is not None:
            parts.append(f"{label} {pattern.format(metrics[name])}")
    seconds = metrics.get("perf/time_per_step", 0.0)
    if seconds > 0 and "perf/total_num_tokens" in metrics:
        parts.append(f"{metrics['perf/total_num_tokens'] / seconds:.0f} tok/s")
    parts += [f"held-out {name} {reward:.3f}" for name, reward in validation_rewards(metrics).items()]
    return " | ".join(parts)


class StepConsole:
    """Prints every step and, on a terminal, keeps a progress bar below. Elsewhere: plain lines, no control characters.

    While the bar is up, what the process prints to stdout and stderr appears above it.
    """

    def __init__(self, *, total_steps: int | None, first_step: int = 0, stream: IO[str] | None = None) -> None:
        self._total_steps = total_steps
        self._stream = stream or sys.stdout
        self._progress: Progress | None = None
        console = Console(file=self._stream, highlight=False)
        if is_live(console):
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
                refresh_per_second=2,  # the trainer needs the CPU more
            )
            self._task = self._progress.add_task("training", total=total_steps, completed=first_step)
            self._progress.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        line = step_line(metrics, step, self._total_steps)
        if self._progress is None:
            self._stream.write(line + "\n")
            self._stream.flush()
        else:
            self._progress.console.print(Text(line), soft_wrap=True)
            self._progress.update(self._task, completed=step)

    def close(self) -> None:
        """Leaves the terminal as it was. Idempotent."""
        if self._progress is not None:
            self._progress.stop()


def print_summary(
    before: Mapping[str, float],
    after: Mapping[str, float],
    artefacts: Mapping[str, str | os.PathLike[str]],
    *,
    stream: IO[str] | None = None,
) -> None:
    """The end of a run: held-out reward by data source before and after training, and where the artefacts are.

    `before` and `after` are as `validation_rewards` returns them, `artefacts` are paths by what they hold. Paths are
    never cut or wrapped.
    """
    console = Console(file=stream or sys.stdout, highlight=False)
    if not is_live(console):
        console = Console(file=stream or sys.stdout, highlight=False, color_system=None, force_terminal=False)
    table = Table(title="held-out reward", title_justify="left")
    table.add_column("data source")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for name in dict.fromkeys((*before, *after)):
        change = f"{after[name] - before[name]:+.3f}" if name in before and name in after else "-"
        table.add_row(Text(name), _reward(before, name), _reward(after, name), change)
    if table.row_count:
        console.print(table)
    width = max((len(label) for label in artefacts), default=0)
    for label, path in artefacts.items():
        console.print(Text(f"{label:<{width}}  {os.fspath(path)}"), soft_wrap=True)


def log_to_console() -> None:
    """Show on stderr what the project reports (INFO and up) and what libraries warn about. Called as a program starts.

    A line is the bare message, behind `warning:` or `error:` where it is one. Every sync has its place in the line of
    its step, so the checkpoint engine is heard from WARNING on.
    """
    handler = _Stderr()
    handler.setFormatter(_Plain())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("verl").setLevel(logging.INFO)
    logging.getLogger("verl.checkpoint_engine").setLevel(logging.WARNING)


class _Stderr(logging.Handler):
    """stderr as it is at the time of each record: a progress bar takes its place while it is up."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 - as every handler of the logging package does
            self.handleError(record)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


def is_live(console: Console) -> bool:
    """Whether cursor movement is welcome. rich alone would also say yes to a pipe when FORCE_COLOR is set."""
    return console.file.isatty() and not console.is_dumb_terminal


def _reward(rewards: Mapping[str, float], name: str) -> str:
    return f"{rewards[name]:.3f}" if name in rewards else "-"
