#!/usr/bin/env python
"""Draw who was busy with what during some steps of a run, from its timeline.jsonl.

python scripts/plot_timeline.py checkpoints/verl_sync/default --steps 3:8 -o timeline.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl.utils.timing import TIMELINE_FILE, Span, read_spans

LOG_PROBS, UPDATE, OTHER = (
    ("log-probs, values", "#9ecae9"),
    ("update", "#4c78a8"),
    ("rewards, advantages, tests", "#bab0ac"),
)
TRAINER = {
    "reward": OTHER,
    "adv": OTHER,
    "testing": OTHER,
    "save_checkpoint": OTHER,
    "old_log_prob": LOG_PROBS,
    "ref": LOG_PROBS,
    "values": LOG_PROBS,
    "update_critic": UPDATE,
    "update_actor": UPDATE,
    "update_weights": ("waits for the sync", "#f58518"),
    "gen": ("waits for samples", "#eeeeee"),
}
SYNC = {
    "prepare": ("prepare", "#d6a5c9"),
    "publish": ("publish", "#f58518"),
    "stage": ("stage, verify", "#72b7b2"),
    "verify": ("stage, verify", "#72b7b2"),
    "wait": ("wait for the boundary", "#eeeeee"),
    "commit": ("commit, activate, resume", "#e45756"),
    "activate": ("commit, activate, resume", "#e45756"),
    "resume": ("commit, activate, resume", "#e45756"),
}
REPLICA = {"generating": ("generates", "#54a24b"), "paused": ("paused", "#e45756")}
"""Of a role: what a span means, and its colour. Those that come later are drawn over those before."""
SLIVER_S = 0.002
"""Shorter spans are drawn this long, so that they can be seen."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw who was busy with what during some steps of a run.")
    parser.add_argument("timeline", type=Path, help=f"{TIMELINE_FILE} of a run, or its output directory")
    parser.add_argument("-s", "--steps", default="", help="first and last step, like 3:8; default: all")
    parser.add_argument("-o", "--output", type=Path, help="PNG to write; default: timeline.png beside the timeline")
    parser.add_argument("--title", default="", help="above the picture")
    options = parser.parse_args(arguments)
    path = options.timeline / TIMELINE_FILE if options.timeline.is_dir() else options.timeline
    output = options.output or path.with_name("timeline.png")
    try:
        draw(read_spans(path), output, steps=parsed(options.steps), title=options.title)
    except FileNotFoundError as exc:
        return fail(f"{exc.filename} does not exist; every run writes one to its output directory")
    except (OSError, ValueError) as exc:
        return fail(str(exc))
    print(output)
    return 0


def fail(message: str) -> int:
    print(f"plot_timeline: {message}", file=sys.stderr)
    return 2


def parsed(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    first, _, last = text.partition(":")
    try:
        return int(first), int(last or first)
    except ValueError:
        raise ValueError(f"--steps takes the first and the last step, like 3:8, not {text!r}") from None


def window(spans: Sequence[Span], steps: tuple[int, int] | None) -> tuple[float, float]:
    """From the beginning of the first of `steps` to the end of the last. Raises ValueError if there are none."""
    found = [
        span
        for span in spans
        if span.name == "step" and span.version is not None and (steps is None or steps[0] <= span.version <= steps[1])
    ]
    if not found:
        raise ValueError("the timeline has none of these steps" if steps else "the timeline has no step")
    return min(span.start_s for span in found), max(span.stop_s for span in found)


def waits_within_syncs(spans: Sequence[Span]) -> list[Span]:
    """A trainer that waits for a sync which waits until engines have generated their batch waits for samples."""
    waits = [span for span in spans if (span.role, span.name) == ("sync", "wait")]
    syncs = [span for span in spans if (span.role, span.name) == ("trainer", "update_weights")]
    both = [(max(one.start_s, two.start_s), min(one.stop_s, two.stop_s)) for one in waits for two in syncs]
    return [
        Span(role="trainer", name="gen", start_s=start_s, stop_s=stop_s) for start_s, stop_s in both if start_s < stop_s
    ]


def draw(spans: Sequence[Span], output: Path, *, steps: tuple[int, int] | None = None, title: str = "") -> None:
    """One lane for the trainer, one for each replica, one for the syncs. Raises ValueError without a step to draw."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt

    start_s, stop_s = window(spans, steps)
    spans = [*spans, *waits_within_syncs(spans)]
    replicas = sorted({span.role for span in spans} - {"trainer", "sync"})
    lanes = {"trainer": TRAINER, **dict.fromkeys(replicas, REPLICA), "sync": SYNC}
    figure, axes = plt.subplots(figsize=(10, 0.55 * len(lanes) + 1.7), layout="constrained")
    labels: dict[str, str] = {}
    for lane, (role, kinds) in enumerate(lanes.items()):
        for name, (label, colour) in kinds.items():
            shown = [
                span
                for span in spans
                if span.role == role and span.name == name and span.stop_s > start_s and span.start_s < stop_s
            ]
            bars = [(span.start_s - start_s, max(span.stop_s - span.start_s, SLIVER_S)) for span in shown]
            new = labels.setdefault(label, colour) == colour and label not in axes.get_legend_handles_labels()[1]
            if bars:
                axes.broken_barh(bars, (lane - 0.35, 0.7), facecolors=colour, label=label if new else None)
            for span in shown:
                if role == "sync" and name == "publish":
                    axes.annotate(f"v{span.version}", (span.start_s - start_s, lane - 0.38), fontsize=7, va="bottom")
    for span in spans:
        if span.name == "step" and start_s < span.start_s < stop_s:
            axes.axvline(span.start_s - start_s, color="#888888", linewidth=0.6, linestyle=":")
    axes.set_xlim(0, stop_s - start_s)
    axes.set_ylim(len(lanes) - 0.5, -0.6)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_xlabel("seconds; dotted: a trainer step begins")
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(output, format="png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
