"""Whole runs on one device: what can be tried there, most valuable first, within a time that is short.

    python -m benchmarks.whole_run --output DIR --budget-s 500

Every stage is a command with a limit of its own; a failure does not stop the rest, and what no longer fits into the
budget is named as not run. `DIR/results.jsonl` gets a line as each stage ends, and `DIR/table.txt` all of them. With
`--device cpu` the same stages rehearse on a small model, and `--dry-run` prints the schedule alone.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks.command import parse, progress
from benchmarks.machine import describe_machine
from verl.utils.builtin import make_tiny_model
from verl.utils.config import option
from verl.utils.tracking import METRICS_FILE, read_metrics

ENDING_S = 15.0
"""Until a stage that is told to end is killed."""
LOOK_S = 8.0
"""Before a stage's end, when it is asked what it is doing."""
LOG_LINES = 400
"""Of a stage's output, and of each process of a run, in what is kept."""
SHOWN = {
    "training/rollout_probs_diff_mean": "probs diff, mean",
    "training/rollout_probs_diff_max": "max",
    "timing_s/step": "step, s",
    "timing_s/gen": "generation",
    "timing_s/old_log_prob": "log-probs",
    "timing_s/update_actor": "update",
    "timing_s/update_weights": "sync",
    "perf/max_memory_allocated_gb": "memory, GB",
    "critic/score/mean": "reward",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    device: str = option("cuda", "where", choices=("cuda", "cpu"))
    stages: list[str] = option([], "only these, in this order; none: all")
    budget_s: float = option(500.0, "seconds for all stages", above=0)
    steps: int = option(10, "trainer steps of the first run; half of them of the others", least=2)
    limit_s: float | None = option(None, "of every stage; none: each has its own", above=0)
    layers: int | None = option(None, "of the dense model; none: those of Qwen3-1.7B", least=1)
    dry_run: int = option(0, "1: print the schedule and end", choices=(0, 1))
    overrides: list[str] = option([], "key=value words for every training run")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A command, the least and most seconds for it, and what else happens."""

    what: str
    command: tuple[str, ...]
    limit_s: float
    model: str | None = None
    least_s: float = 30.0
    output: Path | None = None
    """Where a training run writes."""
    meanwhile: Callable[[subprocess.Popen[str], Path], str] | None = None
    """Called once the run has begun; says what it did."""


@dataclass
class Outcome:
    stage: str
    what: str
    outcome: str = "not run"
    seconds: float = 0.0
    did: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    last_words: str = ""


# -- what is run ------------------------------------------------------------------------------------------------------

SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"hidden_size": 2048, "intermediate_size": 6144, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128},
    "cpu": {"hidden_size": 64, "layers": 2},
}
"""Shapes of a Qwen3 of 1.7B without its vocabulary, which is the built-in tokenizer's."""
EXPERT_SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"hidden_size": 1024, "intermediate_size": 2048, "layers": 16, "heads": 16, "kv_heads": 4, "head_dim": 64},
    "cpu": {"hidden_size": 64, "layers": 2},
}
FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")
"""What `make_tiny_model` makes."""


def make_models(settings: Settings, folder: Path, names: set[str]) -> None:
    """Those of `names` that are not in `folder`: random models with the built-in tokenizer."""
    dense = SIZES[settings.device] | ({"layers": settings.layers} if settings.layers else {})
    shapes = {"dense": ("qwen3", dense), "experts": ("qwen3_moe", EXPERT_SIZES[settings.device])}
    shapes |= {family: (family, {}) for family in FAMILIES}
    for name in names:
        family, shape = shapes[name]
        if not (folder / name / "config.json").exists():
            make_tiny_model(folder / name, family, device=settings.device, **{"dtype": "bfloat16", **shape})


def training(
    settings: Settings,
    output: Path,
    name: str,
    what: str,
    *words: str,
    model: str = "dense",
    is_first: bool = False,
    meanwhile: Callable[[subprocess.Popen[str], Path], str] | None = None,
) -> Stage:
    """A run of `main_ppo`; the first has all steps, and vLLM as it starts by itself."""
    on_device, directory = settings.device == "cuda", output / name.replace(" ", "-")
    prompts, responses = (32, 8) if on_device else (8, 2)
    command = (
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        f"trainer.device={settings.device}",
        "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={directory}",
        f"trainer.experiment_name={directory.name}",
        f"trainer.total_training_steps={settings.steps if is_first else max(2, settings.steps // 2)}",
        "trainer.logger=[console,jsonl]",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.resume_mode=disable",
        "data.train_files=builtin:arithmetic",
        "data.val_files=builtin:arithmetic",
        "data.val_max_samples=8",
        f"data.train_batch_size={prompts}",
        "data.max_prompt_length=64",
        f"data.max_response_length={128 if on_device else 8}",
        f"custom_reward_function.path={Path(__file__).with_name('digit_reward.py')}",
        f"actor_rollout_ref.model.path={output / 'models' / model}",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.n={responses}",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "algorithm.adv_estimator=grpo",
        "checkpoint_engine.check_engine=always",
        *(_QUICK if on_device and not is_first else ()),
        *words,
        *settings.overrides,
    )
    return Stage(
        what=what,
        command=command,
        limit_s=300.0 if is_first else 110.0,
        model=model,
        output=directory,
        meanwhile=meanwhile,
    )


def stages(settings: Settings, output: Path) -> dict[str, Stage]:
    """All stages, most valuable first."""
    train = partial(training, settings, output)
    found = {
        "hybrid": train("hybrid", "FSDP2 and vLLM share the device, its memory sleeps in turn", is_first=True),
        "tests": Stage(
            what="tests marked gpu, and the rates of benchmarks.device",
            command=("bash", "scripts/gpu_check.sh", str(output / "tests"), "--size-gib", "2", "--repeats", "2"),
            limit_s=120.0,
        ),
        "deltas": train("deltas", "as hybrid, deltas only", "checkpoint_engine.delta=always", *_OWN_PROCESS),
        "lora": train(
            "lora",
            "as hybrid, adapters alone are sent",
            "actor_rollout_ref.model.lora_rank=32",
            "actor_rollout_ref.model.lora_alpha=32",
            "actor_rollout_ref.model.lora.merge=false",
        ),
        "fp8": train("fp8", "as hybrid, quantized as it is loaded", "actor_rollout_ref.rollout.quantization=fp8"),
        "experts": train("experts", "as hybrid, a mixture of experts", model="experts"),
        "engine dies": train(
            "engine dies", "as hybrid, the engine is killed after two steps", meanwhile=kill("EngineCore")
        ),
        "rank dies": train(
            "rank dies",
            "as hybrid, the trainer's rank is killed after two steps",
            meanwhile=kill("ray::ActorRolloutRefWorker", "ray::trainer."),
        ),
    }
    for family in FAMILIES:
        report = output / f"certify-{family}.json"
        words = ("--model", str(output / "models" / family), "--json", str(report))
        found[f"certify {family}"] = Stage(
            what="every tensor of vLLM against its load from disk, tokens against transformers",
            command=(sys.executable, "-m", "verl.checkpoint_engine.certify", *words),
            limit_s=90.0,
            model=family,
        )
    return found


_OWN_PROCESS = ("checkpoint_engine.backend=gloo",)
"""Deltas need a node's process, which `naive` has not; `nccl` wants a device for each of its processes."""
_ENGINE = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
_QUICK = (
    f"{_ENGINE}.kv_cache_memory_bytes={8 << 30}",
    f"{_ENGINE}.compilation_config={{mode:0,cudagraph_mode:FULL_DECODE_ONLY,cudagraph_capture_sizes:[64,128,256]}}",
)
"""CUDA graphs of three sizes, nothing compiled, no memory measured: the engine starts sooner."""


def kill(*titles: str) -> Callable[[subprocess.Popen[str], Path], str]:
    """Kills the newest process below the run whose title has one of `titles`, once two steps are done."""

    def killed(process: subprocess.Popen[str], directory: Path) -> str:
        while process.poll() is None:
            if len(_steps(directory)) >= 2:
                victims = [each for each in _below(process.pid) if any(title in _title(each) for title in titles)]
                if victims:
                    victim = max(victims, key=psutil.Process.create_time)
                    named = _title(victim)[:60]
                    victim.send_signal(signal.SIGKILL)
                    return f"killed {named}"
                return (
                    f"no process is called {' or '.join(titles)}; there are {sorted(map(_title, _below(process.pid)))}"
                )
            time.sleep(0.2)
        return "the run ended before"

    return killed


def _below(pid: int) -> list[psutil.Process]:
    """The processes below `pid`, none if it has ended."""
    try:
        return [each for each in psutil.Process(pid).children(recursive=True) if each.is_running()]
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:  # it has ended
        return ""


# -- running ----------------------------------------------------------------------------------------------------------


def run(name: str, stage: Stage, limit_s: float, log: Path) -> Outcome:
    """One stage, as a process group of its own, of which nothing is left; processes of Ray end with their driver."""
    said = Outcome(stage=name, what=stage.what)
    began = time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(
            ["timeout", "--signal=INT", f"--kill-after={ENDING_S}", str(limit_s), *stage.command],
            stdout=stream,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        looking = threading.Timer(max(1.0, limit_s - LOOK_S), look, (process.pid, log.with_suffix(".stacks")))
        looking.start()
        try:
            if stage.meanwhile is not None and stage.output is not None:
                said.did = stage.meanwhile(process, stage.output)
            code = process.wait()
        finally:
            looking.cancel()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    said.seconds = time.monotonic() - began
    said.outcome = {0: "passed", 124: "out of time", 137: "killed, out of time"}.get(code, f"failed, exit code {code}")
    if stage.output is not None:
        said.found = measured(stage.output)
    if code:
        said.last_words = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-12:])
    return said


def look(pid: int, into: Path) -> None:
    """What every process below `pid` is doing, for a stage that is about to be out of time. Needs py-spy."""
    if not (program := shutil.which("py-spy")):
        return
    with into.open("w") as stream:
        for each in _below(pid):
            stream.write(f"== {_title(each)[:100]}\n")
            stream.flush()
            with suppress(subprocess.TimeoutExpired):
                subprocess.run([program, "dump", "--pid", str(each.pid)], stdout=stream, stderr=stream, timeout=5)


def _steps(directory: Path) -> list[dict[str, Any]]:
    path = directory / METRICS_FILE
    return [record for record in read_metrics(path) if record["step"]] if path.exists() else []


def measured(directory: Path) -> dict[str, Any]:
    """Medians over the steps after the first two, or over all if there are no others; all rewards; the last sync."""
    steps = _steps(directory)
    after = steps[2:] or steps
    found: dict[str, Any] = {"steps": len(steps)}
    for name in SHOWN:
        values = [record[name] for record in after if name in record]
        if values:
            found[name] = median(values)
    rewards = [record["critic/score/mean"] for record in steps if "critic/score/mean" in record]
    if rewards:
        found["rewards"] = [round(value, 4) for value in rewards]
    reports = directory / "sync_reports.jsonl"
    if reports.exists():
        found["sync"] = [json.loads(line) for line in reports.read_text().splitlines()][-1]
    return found


def table(outcomes: list[Outcome]) -> str:
    lines = []
    for each in outcomes:
        lines.append(f"{each.stage}: {each.outcome}, {each.seconds:.0f} s. {each.what}. {each.did}".rstrip())
        shown = [f"{label} {each.found[name]:.5g}" for name, label in SHOWN.items() if name in each.found]
        if shown:
            lines.append(f"  {each.found['steps']} steps; " + ", ".join(shown))
        if sync := each.found.get("sync"):
            checks = [check["found"] for check in sync["engine_checks"].values()]
            paused = max(sync["paused_s"].values(), default=0.0)
            lines.append(f"  version {sync['version']} {sync['outcome']}, paused {paused:.3f} s; {'; '.join(checks)}")
        lines += [f"  | {line[:300]}" for line in each.last_words.splitlines()]
    return "\n".join(lines)


def logs_of_processes(since: float) -> Iterator[Path]:
    """What Ray's processes wrote since then."""
    newest = sorted(Path("/tmp/ray").glob("session_2*"), key=lambda path: path.stat().st_mtime)
    for session in newest:
        for path in (session / "logs").glob("worker-*"):
            if path.stat().st_size and path.stat().st_mtime >= since:
                yield path


def keep_logs(output: Path, since: float) -> None:
    """`logs.tar.gz`: the last lines of everything, the metrics and reports of the runs whole."""
    with tarfile.open(output / "logs.tar.gz", "w:gz") as archive:
        for path in output.rglob("*"):
            if path.suffix in (".jsonl", ".json") and path.stat().st_size < 4 << 20:
                archive.add(path, path.relative_to(output))
        for path in [*output.glob("*.log"), *output.glob("*.stacks"), *logs_of_processes(since)]:
            text = path.read_text(errors="replace").splitlines()
            short = output / "short.txt"
            short.write_text("\n".join([*text[: LOG_LINES // 4], "…", *text[-LOG_LINES:]]))
            archive.add(short, f"logs/{path.name}")
            short.unlink()


def main(arguments: list[str] | None = None) -> int:
    files = "results.jsonl, table.txt, logs.tar.gz and the runs"
    settings, output = parse("whole_run", __doc__, Settings, arguments, files=files)
    output = output.resolve()
    began, since = time.monotonic(), time.time()

    def left() -> float:
        return settings.budget_s - (time.monotonic() - began)

    output.mkdir(parents=True, exist_ok=True)
    known = stages(settings, output)
    unknown = [name for name in settings.stages if name not in known]
    if unknown:
        progress(f"error: unknown stages {unknown}; there are {', '.join(known)}")
        return 2
    chosen = {name: known[name] for name in settings.stages or known}
    if settings.dry_run:
        for name, stage in chosen.items():
            print(f"{name}: at most {stage.limit_s:.0f} s. {stage.what}\n    {shlex.join(stage.command)}")
        return 0
    if settings.device == "cuda" and not torch.cuda.is_available():
        progress(f"error: torch {torch.__version__} sees no CUDA device; --device cpu rehearses")
        return 2
    make_models(settings, output / "models", {stage.model for stage in chosen.values() if stage.model})
    progress(f"models: {time.monotonic() - began:.0f} s")
    (output / "machine.json").write_text(json.dumps(describe_machine(), indent=2, default=str) + "\n")
    outcomes = []
    for name, stage in chosen.items():
        if left() < stage.least_s:
            outcomes.append(Outcome(stage=name, what=stage.what, did=f"{left():.0f} s were left"))
        else:
            progress(f"{name}: {left():.0f} s are left")
            log = output / (re.sub(r"\W+", "-", name) + ".log")
            outcomes.append(run(name, stage, min(settings.limit_s or stage.limit_s, left()), log))
        with (output / "results.jsonl").open("a") as stream:
            stream.write(json.dumps(asdict(outcomes[-1]), default=str) + "\n")
        (output / "table.txt").write_text(table(outcomes) + "\n")
        progress(table(outcomes[-1:]))
    keep_logs(output, since)
    print(table(outcomes))
    return int(any(each.outcome != "passed" for each in outcomes))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
