"""The three modes on the same job: how fast they are, who waits for whom, and what a sync costs.

    python -m benchmarks.modes

One after the other, `main_ppo` (hybrid), one step off policy and fully asynchronous train the same model on the same
number of samples, each as a command of its own. The engine decodes few responses at once, so that generation takes as
long as an update or longer, as it does with models of a useful size. The numbers come from the files that every run
writes. After them, the vanilla way to sync is measured with tensors of the same shapes: every one is gathered and
broadcast from rank 0.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import modes_report
from benchmarks.command import make_parser, progress, run
from benchmarks.comparison import BASELINE
from benchmarks.machine import describe_machine
from benchmarks.modes_analysis import analyse
from benchmarks.peers import Job, gathering
from benchmarks.random_model import MIN_MIB, make_random_model
from scripts.plot_timeline import draw as draw_timeline
from verl.checkpoint_engine.errors import ConfigError
from verl.checkpoint_engine.plan.types import TensorSpec
from verl.utils.config import choose_from
from verl.utils.model import resolve_model_path
from verl.utils.timing import TIMELINE_FILE, read_spans
from verl.workers.hf.checkpoint import HFCheckpoint

MODES = {
    "hybrid": "verl.trainer.main_ppo",
    "one_step_off_policy": "verl.experimental.one_step_off_policy.main_ppo",
    "fully_async_policy": "verl.experimental.fully_async_policy.fully_async_main",
}
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
    modes: list[str]
    model: str
    size_mib: float | None
    backend: str
    ranks: int
    steps: int
    warm_up: int
    cool_down: int
    prompts: int
    responses: int
    slots: int
    sync_every: int
    staleness: float
    timeout_s: float
    overrides: list[str]

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
    machine = describe_machine()
    measured = {}
    for mode in settings.modes:
        directory = output / mode
        if (directory / TIMELINE_FILE).exists():
            raise ConfigError(f"{directory} has a run already: choose another --output")
        train(mode, settings, directory)
        measured[mode] = analyse(directory, settings.warm_up, settings.cool_down)
        last = min(settings.warm_up + modes_report.SHOWN_STEPS, settings.steps)
        draw_timeline(
            read_spans(directory / TIMELINE_FILE),
            output / f"{mode}.png",
            steps=(settings.warm_up + 1, last),
            title=f"{modes_report.LABELS[mode]}: steps {settings.warm_up + 1} to {last}",
        )
    progress("vanilla: gathering and broadcasting")
    specs = specs_of(path)
    vanilla_s = vanilla(specs, settings)
    return {
        "benchmark": "modes",
        "settings": asdict(settings),
        "machine": {**machine, "load_average_1min_at_the_end": os.getloadavg()[0]},
        "model": {"nbytes": sum(spec.nbytes for spec in specs), "tensors": len(specs)},
        "modes": measured,
        "vanilla_s": vanilla_s,
        "targets": targets(measured, vanilla_s),
    }


def train(mode: str, settings: Settings, output: Path) -> None:
    """One run, in a process of its own; its lines appear as they come. Raises ConfigError if it fails."""
    command = [sys.executable, "-m", MODES[mode], *settings.arguments(mode, output)]
    last = deque[str](maxlen=20)
    with started(command, settings.timeout_s) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            progress(f"{mode}: {line.rstrip()}")
        code = process.wait()
    if code:
        raise ConfigError(f"{mode} ended with exit code {code}; its last words:\n{''.join(last)}")


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


def specs_of(path: Path) -> list[TensorSpec]:
    with HFCheckpoint(path) as checkpoint:
        return [
            TensorSpec(name=name, shape=checkpoint.shape(name), dtype="bfloat16") for name in sorted(checkpoint.names)
        ]


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
    pause, shorter = ours["paused_of_load"], vanilla_s / ours["sync_seen_s"]
    staging = ours["generating_while_staging"]
    rows = {
        "pause_of_load": (pause, PAUSE_TARGET, pause <= PAUSE_TARGET),
        "generating_while_staging": (staging, STAGING_TARGET, staging >= STAGING_TARGET),
        "sync_shorter_by": (shorter, SYNC_TARGET, shorter >= SYNC_TARGET),
    }
    if "hybrid" in measured:
        idle, hybrid = ours["trainer_idle_ratio"], measured["hybrid"]["trainer_idle_ratio"]
        rows["trainer_idle_ratio"] = (idle, hybrid, idle < hybrid)
    return {name: dict(zip(("value", "target", "reached"), row, strict=True)) for name, row in rows.items()}


def parse(arguments: list[str] | None) -> tuple[Settings, Path]:
    files = "result.json, plot.png, a timeline per mode, and the runs"
    parser = make_parser("modes", __doc__, files)
    add = parser.add_argument
    add("--modes", nargs="+", default=list(MODES), help="what to run (default: all three)")
    add("--model", default="builtin:tiny-qwen2", help="model to train (default: %(default)s)")
    add("--size-mib", type=float, help="train a model of this size with random weights instead")
    add("--backend", default="gloo", help="checkpoint engine backend of all modes (default: %(default)s)")
    add("--ranks", type=int, default=2, help="trainer ranks (default: %(default)s)")
    add("--steps", type=int, default=28, help="trainer steps, all included (default: %(default)s)")
    add("--warm-up", type=int, default=4, help="first steps, which do not count (default: %(default)s)")
    add("--cool-down", type=int, default=4, help="last steps, whose samples are made before (default: %(default)s)")
    add("--prompts", type=int, default=32, help="prompts per step (default: %(default)s)")
    add("--responses", type=int, default=8, help="responses per prompt (default: %(default)s)")
    add("--slots", type=int, default=8, help="responses that the engine decodes at once (default: %(default)s)")
    add("--sync-every", type=int, default=2, help="steps between syncs, fully asynchronous (default: %(default)s)")
    add("--staleness", type=float, default=0.5, help="staleness_threshold, fully asynchronous (default: %(default)s)")
    add("--timeout-s", type=float, default=900.0, help="of one run (default: %(default)s)")
    add("overrides", nargs="*", help="key=value words for all modes; they come before --modes")
    values = vars(parser.parse_args(arguments))
    output = values.pop("output")
    for mode in values["modes"]:
        if mode not in MODES:
            parser.error(f"--modes: unknown {mode!r}.{choose_from(mode, MODES)}")
    for name in ("ranks", "prompts", "responses", "slots", "sync_every"):
        if values[name] < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {values[name]}")
    if values["size_mib"] is not None and values["size_mib"] < MIN_MIB:
        parser.error(f"--size-mib must be at least {MIN_MIB}, not {values['size_mib']:g}")
    warm_up, cool_down = values["warm_up"], values["cool_down"]
    if min(warm_up, cool_down) < 0 or warm_up + cool_down + values["sync_every"] >= values["steps"]:
        between = f"between --warm-up {warm_up} and --cool-down {cool_down}"
        parser.error(f"--steps {values['steps']} leaves no sync {between}")
    return Settings(**values), output


def main(arguments: list[str] | None = None) -> int:
    settings, output = parse(arguments)
    began = time.monotonic()
    code = run(
        output,
        partial(measure, settings, output),
        print_table=modes_report.print_table,
        draw=modes_report.draw,
        pictures=[f"{mode}.png" for mode in settings.modes],
    )
    progress(f"done in {time.monotonic() - began:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
