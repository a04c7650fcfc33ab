"""The three modes on the same job: how fast they are, who waits for whom, and what a sync costs.

    python -m benchmarks.modes

One after the other, `main_ppo` (hybrid), one step off policy and fully asynchronous train the same model on the same
number of samples, each as a command of its own. The engine decodes few responses at once, so that generation takes as
long as an update or longer, as it does with models of a useful size. The numbers come from the files that every run
writes. After them, the vanilla way to sync is measured with tensors of the same shapes: every one is gathered and
broadcast from rank 0.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.command import conduct, parse, progress
from benchmarks.modes_analysis import analyse
from benchmarks.peers import BASELINE, Job, gathering
from benchmarks.random_model import MIN_MIB, make_random_model, specs_of
from benchmarks.report import Panel, Report, cell, table, target, verdict
from scripts.plot_timeline import draw as draw_timeline
from verl.checkpoint_engine.plan.types import TensorSpec
from verl.utils.config import ConfigError, option
from verl.utils.model import resolve_model_path
from verl.utils.timing import TIMELINE_FILE, read_spans

MODES = {
    "hybrid": "verl.trainer.main_ppo",
    "one_step_off_policy": "verl.experimental.one_step_off_policy.main_ppo",
    "fully_async_policy": "verl.experimental.fully_async_policy.fully_async_main",
}
LABELS = {
    "hybrid": "hybrid",
    "one_step_off_policy": "one step off policy",
    "fully_async_policy": "fully asynchronous",
}
SHOWN_STEPS = 8
"""In the pictures of the timelines."""
VANILLA_REPEATS = 5
PAUSE_TARGET = 1.2
"""Of the seconds that the engine needs for loading, at most."""
STAGING_TARGET = 0.5
"""Share of staging during which the engines of the asynchronous mode generate, at least."""
SYNC_TARGET = 20.0
"""Times shorter than the vanilla way, as the trainer sees it."""
END_S = 60.0
"""Until a run that is told to stop has cleaned up."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    modes: list[str] = option(list(MODES), "what to run", choices=tuple(MODES))
    model: str = option("builtin:tiny-qwen2", "model to train")
    size_mib: float | None = option(None, "train a model of this size with random weights instead", least=MIN_MIB)
    backend: str = option("gloo", "checkpoint engine backend of all modes")
    ranks: int = option(2, "trainer ranks", least=1)
    steps: int = option(28, "trainer steps, all included")
    warm_up: int = option(4, "first steps, which do not count", least=0)
    cool_down: int = option(4, "last steps, whose samples are made before", least=0)
    prompts: int = option(32, "prompts per step", least=1)
    responses: int = option(8, "responses per prompt", least=1)
    slots: int = option(8, "responses that the engine decodes at once", least=1)
    sync_every: int = option(2, "steps between syncs, fully asynchronous", least=1)
    staleness: float = option(0.5, "staleness_threshold, fully asynchronous")
    timeout_s: float = option(900.0, "of one run", above=0)
    overrides: list[str] = option([], "key=value words for all modes; they come before --modes")

    def __post_init__(self) -> None:
        if self.warm_up + self.cool_down + self.sync_every >= self.steps:
            between = f"between --warm-up {self.warm_up} and --cool-down {self.cool_down}"
            raise ConfigError(f"--steps {self.steps} leaves no sync {between}")

    def arguments(self, mode: str, output: Path) -> list[str]:
        """Of the mode's command. A step is one optimizer step in all of them."""
        common = [
            f"trainer.default_local_dir={output}",
            f"trainer.total_training_steps={self.steps}",
            f"trainer.n_gpus_per_node={self.ranks}",
            "trainer.logger=[console,jsonl]",
            "trainer.test_freq=-1",
            "trainer.resume_mode=disable",
            f"actor_rollout_ref.model.path={self.model}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.prompts}",
            f"actor_rollout_ref.rollout.n={self.responses}",
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.rollout.max_num_seqs={self.slots}",
            f"data.train_batch_size={self.prompts}",
            f"checkpoint_engine.backend={self.backend}",
        ]
        apart = [
            f"async_training.trigger_parameter_sync_step={self.sync_every}",
            f"async_training.staleness_threshold={self.staleness}",
        ]
        return [*common, *(apart if mode == "fully_async_policy" else []), *self.overrides]


def measure(settings: Settings, output: Path) -> dict[str, Any]:
    """Run the benchmark; everything that the JSON file holds."""
    if settings.size_mib is not None:
        settings = replace(settings, model=str(make_random_model(output / "model", settings.size_mib)))
    path = resolve_model_path(settings.model)  # made before anything is measured
    measured = {}
    for mode in settings.modes:
        directory = output / mode
        if (directory / TIMELINE_FILE).exists():
            raise ConfigError(f"{directory} has a run already: choose another --output")
        train(mode, settings, directory)
        measured[mode] = analyse(directory, settings.warm_up, settings.cool_down)
        last = min(settings.warm_up + SHOWN_STEPS, settings.steps)
        draw_timeline(
            read_spans(directory / TIMELINE_FILE),
            output / f"{mode}.png",
            steps=(settings.warm_up + 1, last),
            title=f"{LABELS[mode]}: steps {settings.warm_up + 1} to {last}",
        )
    progress("vanilla: gathering and broadcasting")
    specs = specs_of(path)
    vanilla_s = vanilla(specs, settings)
    return {
        "settings": asdict(settings),
        "model": {"nbytes": sum(spec.nbytes for spec in specs), "tensors": len(specs)},
        "modes": measured,
        "vanilla_s": vanilla_s,
        "targets": targets(measured, vanilla_s),
    }


def train(mode: str, settings: Settings, output: Path) -> None:
    """One run, in a process of its own; its lines appear as they come. Raises ConfigError if it fails."""
    run(mode, MODES[mode], settings.arguments(mode, output), settings.timeout_s)


def run(name: str, module: str, arguments: Sequence[str], timeout_s: float) -> None:
    """A command of ours, in a process of its own; its lines appear as they come, with `name` before them.

    Raises ConfigError if it fails.
    """
    last = deque[str](maxlen=20)
    with started([sys.executable, "-m", module, *arguments], timeout_s) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            progress(f"{name}: {line.rstrip()}")
        code = process.wait()
    if code:
        raise ConfigError(f"{name} ended with exit code {code}; its last words:\n{''.join(last)}")


@contextmanager
def started(command: Sequence[str], timeout_s: float) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, so that whatever ends this one, it can clean up; told to after `timeout_s`."""
    process = subprocess.Popen(
        ["timeout", "--signal=TERM", f"--kill-after={END_S}", str(timeout_s), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(2 * END_S)


def vanilla(specs: list[TensorSpec], settings: Settings) -> float:
    """Seconds that the trainer is blocked while it gathers and broadcasts; the median."""
    job = Job(specs=specs, source_dtype="float32", trainers=settings.ranks, nodes=1)
    with gathering(job) as ways:
        return median([ways[BASELINE]().blocked_s for _ in range(1 + VANILLA_REPEATS)][1:])


def targets(measured: dict[str, Any], vanilla_s: float) -> dict[str, Any]:
    """Each target's value and whether it is reached. Of the fully asynchronous mode, where that was run."""
    ours = measured.get("fully_async_policy")
    if ours is None:
        return {}
    rows = {
        "pause_of_load": target(ours["paused_of_load"], PAUSE_TARGET, "at most"),
        "generating_while_staging": target(ours["generating_while_staging"], STAGING_TARGET, "at least"),
        "sync_shorter_by": target(vanilla_s / ours["sync_seen_s"], SYNC_TARGET, "at least"),
    }
    if "hybrid" in measured:
        hybrid = measured["hybrid"]["trainer_idle_ratio"]
        rows["trainer_idle_ratio"] = target(ours["trainer_idle_ratio"], hybrid, "below")
    return rows


ROWS = {
    "tokens/s": "{tokens_per_s:.0f}",
    "trainer waits for samples, share of the step": "{trainer_idle_ratio:.0%}",
    "trainer waits for the sync, share of the step": "{sync_ratio:.1%}",
    "rollout engine idle or paused, share of the time": "{rollout_idle_ratio:.0%}",
    "staleness, mean": "{staleness_mean:.2f}",
    "staleness, max": "{staleness_max:.0f}",
    "a sync, as the trainer sees it, s": "{sync_seen_s:.3f}",
    "of that the copy of its shards, s": "{sync_copy_s:.4f}",
    "a sync from begin to end, s": "{sync_total_s:.3f}",
    "generation paused per sync, s": "{paused_s:.3f}",
    "of that the engine loads, s": "{load_s:.3f}",
    "generation paused, times the load": "{paused_of_load:.2f}",
    "share of staging in which the engine generates": "{generating_while_staging:.0%}",
    "held-out reward before": "{reward_before:.3f}",
    "held-out reward after as many samples": "{reward_after:.3f}",
}
TARGETS = {
    "pause_of_load": ("generation paused per sync / the engine's load", "{:.2f}"),
    "generating_while_staging": ("share of staging in which the engine generates", "{:.0%}"),
    "sync_shorter_by": ("a sync as the trainer sees it, times shorter than the vanilla way", "{:.1f}"),
    "trainer_idle_ratio": ("trainer waits for samples, next to hybrid", "{:.0%}"),
}
"""Of the fully asynchronous mode."""


def report(result: dict[str, Any]) -> Report:
    """Tokens per second, who waits, what a sync costs, and training rewards."""
    settings, mib, measured = result["settings"], result["model"]["nbytes"] / 2**20, result["modes"]
    steps = settings["steps"] - settings["warm_up"] - settings["cool_down"]
    model = "random weights" if settings["size_mib"] else settings["model"]
    title = (
        f"{model} ({mib:.1f} MiB of bfloat16), backend {settings['backend']}, trainer ranks: {settings['ranks']}; "
        f"{steps} steps of {settings['prompts']} prompts, {settings['responses']} responses each, "
        f"between {settings['warm_up']} and {settings['cool_down']} more"
    )
    rows = [
        {"what": what, **{mode: cell(form, values) for mode, values in measured.items()}} for what, form in ROWS.items()
    ]
    columns = {"": "{what}"} | {LABELS[mode]: f"{{{mode}}}" for mode in measured}
    per_step = settings["prompts"] * settings["responses"]
    rewards = {
        LABELS[mode]: [(per_step * (step + 1), reward) for step, reward in enumerate(values["training_rewards"])]
        for mode, values in measured.items()
    }

    def bars(x: str, form: str, **keys: str) -> Panel:
        series = {
            LABELS[mode]: [(name.replace("_", " "), values[key]) for name, key in keys.items()]
            for mode, values in measured.items()
        }
        return Panel(kind="bars", series=series, x=x, form=form)

    return Report(
        [
            table(title, columns, rows),
            f"vanilla, the same {mib:.1f} MiB gathered and broadcast: trainer blocked {result['vanilla_s']:.3f} s",
            "\n".join(verdict(*TARGETS[key], row) for key, row in result["targets"].items()),
        ],
        [
            bars("tokens/s", "%.0f", all="tokens_per_s"),
            bars("share of the time", "%.2f", trainer_waits="trainer_idle_ratio", engine_idle="rollout_idle_ratio"),
            bars("seconds of a sync", "%.3f", trainer_waits="sync_seen_s", generation_paused="paused_s"),
            Panel(kind="lines", series=rewards, x="responses", y="training reward"),
        ],
    )


def main(arguments: list[str] | None = None) -> int:
    files = "result.json, tables.md, plot.png, a timeline per mode, and the runs"
    settings, output = parse("modes", __doc__, Settings, arguments, files=files)
    return conduct("modes", settings, output, lambda: measure(settings, output), report)


if __name__ == "__main__":
    sys.exit(main())
