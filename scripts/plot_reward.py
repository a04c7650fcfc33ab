#!/usr/bin/env python
"""Draw the reward curve of a run from its metrics.jsonl.

python scripts/plot_reward.py checkpoints/verl_sync/default/metrics.jsonl -o reward.png
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.utils.console import validation_rewards
from verl.utils.tracking import METRICS_FILE, read_metrics

Curve = dict[int, float]
"""Reward by step."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Draw the reward curve of a run: mean training reward per step, held-out reward where validated."
    )
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of a run (trainer.logger=[jsonl]), or its directory")
    parser.add_argument("-o", "--output", type=Path, help="PNG to write; default: reward.png next to the metrics")
    parser.add_argument("--title", default="Reward", help="above the curve")
    options = parser.parse_args(arguments)
    path = options.metrics / METRICS_FILE if options.metrics.is_dir() else options.metrics
    output = options.output or path.with_name("reward.png")
    try:
        training, held_out = curves(read_metrics(path))
        draw(training, held_out, output, title=options.title)
    except FileNotFoundError as exc:
        return fail(f"{exc.filename} does not exist; runs write it with trainer.logger=[jsonl]")
    except (OSError, ValueError) as exc:
        return fail(str(exc))
    print(output)
    return 0


def fail(message: str) -> int:
    print(f"plot_reward: {message}", file=sys.stderr)
    return 2


def curves(records: Sequence[dict[str, Any]]) -> tuple[Curve, dict[str, Curve]]:
    """Training reward, and held-out reward by data source. Raises ValueError if there is neither."""
    training: Curve = {}
    held_out: dict[str, Curve] = defaultdict(dict)
    for record in records:
        reward = record.get("critic/score/mean", record.get("critic/rewards/mean"))
        if reward is not None:
            training[record["step"]] = reward
        for data_source, value in validation_rewards(record).items():
            held_out[data_source][record["step"]] = value
    if not training and not held_out:
        raise ValueError(f"no reward in {len(records)} records: neither critic/score/mean nor val-core/*/reward/mean@n")
    return training, held_out


def draw(training: Curve, held_out: dict[str, Curve], output: Path, *, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    if training:
        axes.plot(list(training), list(training.values()), color="tab:gray", label="training batch, mean")
    for data_source, curve in held_out.items():
        axes.plot(list(curve), list(curve.values()), marker="o", linewidth=2, label=f"held-out: {data_source}")
    axes.set(title=title, xlabel="training step", ylabel="reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(output, format="png", dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
