"""The table and the plot of `benchmarks.modes`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

LABELS = {
    "hybrid": "hybrid",
    "one_step_off_policy": "one step off policy",
    "fully_async_policy": "fully asynchronous",
}
COLOURS = {"hybrid": "#bab0ac", "one_step_off_policy": "#4c78a8", "fully_async_policy": "#54a24b"}
SHOWN_STEPS = 8
"""In the pictures of the timelines."""
ROWS = {
    "tokens_per_s": ("tokens/s", "{:.0f}"),
    "trainer_idle_ratio": ("trainer waits for samples, share of the step", "{:.0%}"),
    "sync_ratio": ("trainer waits for the sync, share of the step", "{:.1%}"),
    "rollout_idle_ratio": ("rollout engine idle or paused, share of the time", "{:.0%}"),
    "staleness_mean": ("staleness, mean", "{:.2f}"),
    "staleness_max": ("staleness, max", "{:.0f}"),
    "sync_seen_s": ("a sync, as the trainer sees it, s", "{:.3f}"),
    "sync_copy_s": ("of that the copy of its shards, s", "{:.4f}"),
    "sync_total_s": ("a sync from begin to end, s", "{:.3f}"),
    "paused_s": ("generation paused per sync, s", "{:.3f}"),
    "load_s": ("of that the engine loads, s", "{:.3f}"),
    "paused_of_load": ("generation paused, times the load", "{:.2f}"),
    "generating_while_staging": ("share of staging in which the engine generates", "{:.0%}"),
    "reward_before": ("held-out reward before", "{:.3f}"),
    "reward_after": ("held-out reward after as many samples", "{:.3f}"),
}
TARGETS = {
    "pause_of_load": ("generation paused per sync / the engine's load", "{:.2f}", "at most"),
    "generating_while_staging": ("share of staging in which the engine generates", "{:.0%}", "at least"),
    "sync_shorter_by": ("a sync as the trainer sees it, times shorter than the vanilla way", "{:.1f}", "at least"),
    "trainer_idle_ratio": ("trainer waits for samples, next to hybrid", "{:.0%}", "below"),
}
"""Of the fully asynchronous mode."""


def print_table(result: dict[str, Any]) -> None:
    settings, machine, mib = result["settings"], result["machine"], result["model"]["nbytes"] / 2**20
    measured = result["modes"]
    steps = settings["steps"] - settings["warm_up"] - settings["cool_down"]
    model = "random weights" if settings["size_mib"] else settings["model"]
    table = Table(
        title=f"{model} ({mib:.1f} MiB of bfloat16), backend {settings['backend']}, "
        f"trainer ranks: {settings['ranks']}\n{steps} steps of {settings['prompts']} prompts, "
        f"{settings['responses']} responses each, between {settings['warm_up']} and {settings['cool_down']} more"
    )
    table.add_column("")
    for mode in measured:
        table.add_column(LABELS[mode], justify="right")
    for key, (label, form) in ROWS.items():
        table.add_row(label, *(_text(form, values[key]) for values in measured.values()))
    console = Console(width=120)
    console.print(table)
    console.print(
        f"vanilla, the same {mib:.1f} MiB gathered and broadcast: trainer blocked {result['vanilla_s']:.3f} s"
    )
    for key, row in result["targets"].items():
        what, form, sign = TARGETS[key]
        verdict = "reached" if row["reached"] else "NOT reached"
        console.print(f"{what}: {form.format(row['value'])} (target: {sign} {form.format(row['target'])}): {verdict}")
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, load {machine['load_average_1min']:.1f} before, "
        f"{machine['load_average_1min_at_the_end']:.1f} after"
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Tokens per second, who waits, what a sync costs, and training rewards."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    measured = result["modes"]
    figure, panels = plt.subplots(1, 4, figsize=(14, 3.4), layout="constrained", width_ratios=(1, 1.7, 1.7, 1.7))
    groups = (
        ("tokens/s", {"": "tokens_per_s"}, "%.0f"),
        ("share of the time", {"trainer\nwaits": "trainer_idle_ratio", "engine\nidle": "rollout_idle_ratio"}, "%.2f"),
        ("seconds of a sync", {"trainer\nwaits": "sync_seen_s", "generation\npaused": "paused_s"}, "%.3f"),
    )
    width = 0.8 / len(measured)
    for axes, (title, keys, form) in zip(panels, groups, strict=False):
        for index, (mode, values) in enumerate(measured.items()):
            places = [group + (index + 0.5) * width - 0.4 for group in range(len(keys))]
            bars = axes.bar(places, [values[key] for key in keys.values()], 0.95 * width, color=COLOURS[mode])
            axes.bar_label(bars, fmt=form, fontsize=7, padding=1)
        axes.set_xticks(range(len(keys)), list(keys))
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
    per_step = result["settings"]["prompts"] * result["settings"]["responses"]
    for mode, values in measured.items():
        rewards = values["training_rewards"]
        samples = [per_step * (step + 1) for step in range(len(rewards))]
        panels[3].plot(samples, rewards, color=COLOURS[mode], label=LABELS[mode])
    panels[3].set_title("training reward by responses")
    panels[3].spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _text(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)
