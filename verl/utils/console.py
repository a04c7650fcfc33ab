"""What a run shows on the terminal: a progress bar, one line per step, a summary at the end."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from verl.checkpoint_engine.support.console import is_live

WIDTH = 80
"""Columns where there is no terminal to ask."""
LINE_FIELDS: tuple[tuple[str, tuple[str, ...], int, str], ...] = (
    ("reward ", ("critic/score/mean", "critic/rewards/mean"), 3, ""),
    ("response ", ("response_length/mean",), 1, " tok"),
    ("probs diff ", ("training/rollout_probs_diff_mean",), 4, ""),
    ("gen ", ("timing_s/gen",), 1, " s"),
    ("update ", ("timing_s/update_actor",), 1, " s"),
    ("sync ", ("timing_s/update_weights",), 2, " s"),
    ("", ("tokens_per_second",), 0, " tok/s"),
    ("kl ", ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"), 4, ""),
    ("entropy ", ("actor/entropy",), 3, ""),
    ("grad ", ("actor/grad_norm",), 2, ""),
    ("clipped ", ("actor/pg_clipfrac",), 3, ""),
    ("cut off ", ("response_length/clip_ratio",), 2, ""),
    ("no signal ", ("critic/frac_reward_zero_std",), 2, ""),
)
"""Label, metrics of which the first that is there is shown, decimals, unit; the most needed first."""
NEEDED = tuple(label for label, *_ in LINE_FIELDS[:7])
"""Labels of what is shortened before anything of it is left out."""
SHORT_LABELS = {"response ": "", "probs diff ": "diff "}
HELD_OUT = re.compile(r"val-core/(?P<source>.*)/(?:acc|reward)/mean@\d+")
SECONDS = ("gen ", "update ", "sync ")
"""Shown as one sum where space is short."""


def validation_rewards(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Held-out mean by data source, of `acc`, or else of the reward, out of the metrics of one step; empty if it was
    not validated."""
    found = {HELD_OUT.fullmatch(name): value for name, value in metrics.items() if value is not None}
    return {match["source"]: value for match, value in found.items() if match}


def step_line(metrics: Mapping[str, float], step: int, total_steps: int | None, width: int = WIDTH) -> str:
    """The step in one line of plain text that fits `width`, then the held-out rewards on lines of their own.

    What was not measured is left out. So is what has no room, the least needed first; before that labels get shorter
    and the seconds become one sum, `gen+update+sync`.
    """
    name = f"step {step}" if total_steps is None else f"step {step:>{len(str(total_steps))}}/{total_steps}"
    found = _measured(metrics)
    parts = [label + value for label, value in found.items()]
    needed = [label + value for label, value in found.items() if label in NEEDED]
    if len(" | ".join((name, *needed))) > width:
        parts = _short(found)
    held_out = [_held_out(*each, room=width - len(f"{name} | ")) for each in validation_rewards(metrics).items()]
    lines = [_fitted(name, parts, width), *_wrapped(name, held_out, width)]
    return "\n".join(lines if parts or not held_out else lines[1:])


def _measured(metrics: Mapping[str, float]) -> dict[str, str]:
    """Value and unit by label."""
    seconds = metrics.get("perf/time_per_step", 0.0)
    if seconds > 0 and "perf/total_num_tokens" in metrics:
        metrics = {**metrics, "tokens_per_second": metrics["perf/total_num_tokens"] / seconds}
    found: dict[str, str] = {}
    for label, names, decimals, unit in LINE_FIELDS:
        name = next((name for name in names if name in metrics), None)
        if name is not None:
            found[label] = _number(metrics[name], decimals) + unit
    return found


def _number(value: float, decimals: int) -> str:
    """The larger the number, the fewer decimals: at most seven characters, or eight with a sign."""
    if not math.isfinite(value):
        return str(value)
    whole = len(f"{abs(value):.0f}")
    return f"{value:.{max(0, min(decimals, decimals + 2 - whole))}f}" if whole < 7 else f"{value:.1e}"


def _short(found: Mapping[str, str]) -> list[str]:
    parts = {label: SHORT_LABELS.get(label, label) + value for label, value in found.items()}
    if all(label in found for label in SECONDS):
        parts[SECONDS[0]] = "+".join(found[label].removesuffix(" s") for label in SECONDS) + " s"
        for label in SECONDS[1:]:
            del parts[label]
    return list(parts.values())


def _fitted(name: str, parts: Sequence[str], width: int) -> str:
    line = name
    for part in parts:
        if len(longer := f"{line} | {part}") > width:
            break
        line = longer
    return line


def _wrapped(name: str, parts: Sequence[str], width: int) -> list[str]:
    """All of `parts`, on as many lines as they need, each of which begins with `name`."""
    lines: list[str] = []
    for part in parts:
        if lines and len(longer := f"{lines[-1]} | {part}") <= width:
            lines[-1] = longer
        else:
            lines.append(f"{name} | {part}")
    return lines


def _held_out(source: str, reward: float, room: int) -> str:
    """Of a name that is too long its end is shown, which tells more."""
    text = f" {_number(reward, 3)}"
    space = max(8, room - len("held-out ") - len(text))
    return f"held-out {source if len(source) <= space else '...' + source[3 - space :]}{text}"


class StepConsole:
    """Prints every step and, on a terminal, keeps a progress bar below. Elsewhere: plain lines of up to 80 columns, no
    control characters.

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
        if self._progress is None:
            self._stream.write(step_line(metrics, step, self._total_steps) + "\n")
            self._stream.flush()
        else:
            console = self._progress.console
            console.print(Text(step_line(metrics, step, self._total_steps, console.width)), soft_wrap=True)
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


def _reward(rewards: Mapping[str, float], name: str) -> str:
    return f"{rewards[name]:.3f}" if name in rewards else "-"
