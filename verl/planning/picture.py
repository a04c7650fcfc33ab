"""A plan as a picture: the seconds of every way, and needed beside available memory."""

from __future__ import annotations

from pathlib import Path

from verl.planning.forecast import TIMED
from verl.planning.planned import Planned
from verl.utils.config import ConfigError

COLOURS = ("#4c78a8", "#54a24b", "#f58518", "#e45756", "#b279a2", "#9d755d")


def draw(result: Planned, path: Path) -> None:
    """Draw the plan to a file. Raises ConfigError for an unsupported file type."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ways = sorted(result.forecasts, key=lambda one: one.slow.total)
    height = 1.6 + 0.26 * max(len(ways), len(result.memory))
    figure, (seconds, memory) = plt.subplots(1, 2, figsize=(12, height), layout="constrained")
    names = [f"{one.way.name}{', delta' if one.delta else ''}" for one in ways]
    left = [0.0] * len(ways)
    for phase, colour in zip(TIMED, COLOURS, strict=True):
        widths = [one.slow.phases[phase] for one in ways]
        seconds.barh(names, widths, left=left, color=colour, label=phase)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    fastest = [one.fast.total for one in ways]
    seconds.plot(fastest, names, "|", color="black", markersize=9, label="total at the fastest")
    seconds.invert_yaxis()
    seconds.set_xlabel("seconds of a sync, at the slowest")
    seconds.legend(frameon=False, fontsize=8)
    places = [f"{need.where}: {need.phase}" for need in result.memory]
    colours = ["#e45756" if need.fits is False else "#4c78a8" for need in result.memory]
    memory.barh(places, [need.nbytes / 2**30 for need in result.memory], color=colours)
    for need, place in zip(result.memory, places, strict=True):
        if need.available_nbytes is not None:
            memory.plot(need.available_nbytes / 2**30, place, "|", color="black", markersize=12)
    memory.invert_yaxis()
    memory.set_xlabel("GiB needed; |: there is")
    for axes in (seconds, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.suptitle(result.model.name, fontsize=10)
    try:
        figure.savefig(path, dpi=120)
    except ValueError as exc:
        raise ConfigError(f"--plot {path}: {exc}") from exc
    finally:
        plt.close(figure)
