"""A run's output on the terminal: a progress bar, one line per step, a summary at the end."""

from __future__ import annotations

import io
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from rich.box import ASCII
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from verl.checkpoint_engine.support.console import is_live

WIDTH = 80
"""Columns without a terminal."""
Field = tuple[str, tuple[str, ...], int | None, str]
"""Label, metrics (the first present one is shown), decimals (None: two significant digits), unit."""
NEEDED: tuple[Field, ...] = (
    ("reward ", ("critic/score/mean", "critic/rewards/mean"), 3, ""),
    ("response ", ("response_length/mean",), 1, " tok"),
    ("probs diff ", ("training/rollout_probs_diff_mean",), 4, ""),
    ("gen ", ("timing_s/gen",), 1, " s"),
    ("update ", ("timing_s/update_actor",), 1, " s"),
    ("sync ", ("timing_s/update_weights",), 2, " s"),
    ("", ("tokens_per_second",), 0, " tok/s"),
)
"""The most important fields."""
HEALTH: tuple[Field, ...] = (
    ("kl ", ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"), 4, ""),
    ("clip ", ("actor/pg_clipfrac",), 2, ""),
    ("cut off ", ("response_length/clip_ratio",), 2, ""),
    ("no signal ", ("critic/frac_reward_zero_std",), 2, ""),
    ("lr ", ("actor/lr",), None, ""),
    ("", ("perf/max_memory_allocated_gb", "perf/cpu_memory_used_gb"), 1, " GiB"),
    ("entropy ", ("actor/entropy",), 3, ""),
    ("mfu ", ("perf/mfu/actor",), 2, ""),
    ("grad ", ("actor/grad_norm",), 2, ""),
)
"""Fields on the health of the run, the most important first."""
SHORT_LABELS = {"response ": "", "probs diff ": "diff "}
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
MOST_OF_A_TEXT = 600
"""The most characters of a prompt, an answer or a truth in a box."""
BAR_WIDTH = 44
"""Columns of the bar, the counts (without digits) and both times."""
HELD_OUT = re.compile(r"val-core/(?P<source>.*)/(?:acc|reward)/mean@\d+")
SECONDS = ("gen ", "update ", "sync ")
"""Fields shown as one sum if space is short."""


def validation_rewards(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The held-out mean of `acc`, or else of the reward, by data source, from the metrics of a step; empty without a
    validation."""
    found = {HELD_OUT.fullmatch(name): value for name, value in metrics.items() if value is not None}
    return {match["source"]: value for match, value in found.items() if match}


def step_line(metrics: Mapping[str, float], step: int, total_steps: int | None, width: int = WIDTH) -> str:
    """The step as lines of plain text within `width`: one line, or a second one for its health if both do not fit.
    Held-out rewards have lines of their own.

    Omits fields that were not measured. If a line is too long, labels are shortened, then the seconds become one sum,
    `gen+update+sync`, then the least important fields are omitted.
    """
    name = f"step {step}" if total_steps is None else f"step {step:>{len(str(total_steps))}}/{total_steps}"
    needed, health = _measured(metrics, NEEDED), _measured(metrics, HEALTH)
    parts = [label + value for label, value in needed.items()]
    signs = [label + value for label, value in health.items()]
    if len(" | ".join((name, *parts, *signs))) <= width:
        parts, signs = [*parts, *signs], []
    elif len(" | ".join((name, *parts))) > width:
        parts = _short(needed)
    held_out = [_held_out(*each, room=width - len(f"{name} | ")) for each in validation_rewards(metrics).items()]
    lines = [_fitted(name, parts, width)] if parts or not held_out else []
    if signs:
        lines.append(_fitted(f"  {signs[0]}", signs[1:], width))
    return "\n".join([*lines, *_wrapped(name, held_out, width)])


def _measured(metrics: Mapping[str, float], fields: Sequence[Field]) -> dict[str, str]:
    """Value and unit by label."""
    seconds = metrics.get("perf/time_per_step", 0.0)
    if seconds > 0 and "perf/total_num_tokens" in metrics:
        metrics = {**metrics, "tokens_per_second": metrics["perf/total_num_tokens"] / seconds}
    found: dict[str, str] = {}
    for label, names, decimals, unit in fields:
        name = next((name for name in names if name in metrics), None)
        if name is not None:
            found[label] = _number(metrics[name], decimals) + unit
    return found


def _number(value: float, decimals: int | None) -> str:
    """The larger the number, the fewer decimals: at most seven characters, or eight with a sign."""
    if not math.isfinite(value):
        return str(value)
    if decimals is None:
        return f"{value:.2g}"
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
    """Prints every step and, on a terminal, keeps a progress bar below. Without one: plain lines of up to 80 columns,
    no control characters.

    While the bar is shown, the process's output to stdout and stderr appears above it.
    """

    def __init__(self, *, total_steps: int | None, first_step: int = 0, stream: IO[str] | None = None) -> None:
        self._total_steps = total_steps
        self._stream = stream or sys.stdout
        self._progress: Progress | None = None
        console = Console(file=self._stream, highlight=False)
        if is_live(console):
            self._progress = Progress(
                BarColumn(bar_width=8),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("elapsed,"),
                TimeRemainingColumn(),
                TextColumn("left; {task.fields[phase]}"),
                console=console,
                refresh_per_second=2,  # the trainer needs the CPU more
            )
            self._task = self._progress.add_task("training", total=total_steps, completed=first_step, phase="")
            self._progress.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._progress is None:
            self._stream.write(step_line(metrics, step, self._total_steps) + "\n")
            self._stream.flush()
        else:
            console = self._progress.console
            console.print(Text(step_line(metrics, step, self._total_steps, console.width)), soft_wrap=True)
            self._progress.update(self._task, completed=step)

    def show_phase(self, text: str) -> None:
        """Show a phase beside the bar, if there is one, cut to the space. Called from any thread."""
        if self._progress is not None:
            room = self._progress.console.width - BAR_WIDTH - 2 * len(str(self._total_steps))
            self._progress.update(self._task, phase=text[: max(room, 0)])

    def close(self) -> None:
        """Restore the terminal. Idempotent."""
        if self._progress is not None:
            self._progress.stop()


def boxed(title: str, parts: Mapping[str, str], width: int = WIDTH) -> str:
    """A box of plain text with a paragraph for each of `parts`. Omits the middle of long ones, and control
    characters."""
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(overflow="fold", ratio=1)
    for name, text in parts.items():
        table.add_row(name, Text(_shortened(CONTROL.sub("?", text.strip()))))
    lines = io.StringIO()
    panel = Panel(table, title=Text(_shortened(title, width - 8)), title_align="left", box=ASCII)
    Console(file=lines, width=width, color_system=None, force_terminal=False, highlight=False).print(panel)
    return lines.getvalue().rstrip("\n")


def _shortened(text: str, room: int = MOST_OF_A_TEXT) -> str:
    return text if len(text) <= room else f"{text[: room * 2 // 3]} ... {text[5 - (room - room * 2 // 3) :]}"


def print_summary(
    before: Mapping[str, float],
    after: Mapping[str, float],
    artefacts: Mapping[str, str | os.PathLike[str]],
    *,
    stream: IO[str] | None = None,
) -> None:
    """Print the end of a run: the held-out reward by data source before and after training, and the artefacts' paths.

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
