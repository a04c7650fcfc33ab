"""Services that store the metrics of runs, each with its own package, environment variables and login."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from verl.utils.config import ConfigError

RUNS_FILE = "trackers.json"
SAMPLES = "val/generations"
"""What verl calls the table of samples."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Facts about the run for backends."""

    project_name: str
    experiment_name: str
    output_dir: Path
    config: Mapping[str, Any]
    """The whole configuration as plain dicts, lists and scalars."""
    total_steps: int | None
    """The number of steps, for the progress bar; None if unknown."""
    resume_step: int
    """The step that the run continues after; 0: from the start."""

    def known_as(self, service: str) -> str | None:
        """The id that `service` gave the run that this one continues. None for a run from the start."""
        return self._ids().get(service) if self.resume_step else None

    def remember(self, service: str, name: str) -> None:
        """Keep the id that `service` gave this run in its directory."""
        text = json.dumps(self._ids() | {service: name}) + "\n"
        (writable(self.output_dir) / RUNS_FILE).write_text(text, encoding="utf-8")

    def _ids(self) -> dict[str, str]:
        path = self.output_dir / RUNS_FILE
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
        except ValueError as exc:
            raise ConfigError(f"{path} cannot be read; without it services show the run as another one") from exc


@dataclass(frozen=True)
class Histogram:
    """The number of values up to each limit, and above the limit before."""

    limits: Sequence[float]
    counts: Sequence[int]


class Sample(NamedTuple):
    """A prompt of the validation, an answer, and its score."""

    prompt: str
    answer: str
    score: float


class Tracker(Protocol):
    """One destination of metrics. Made before the run starts; its constructor raises ConfigError if it cannot work."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record one step, durably enough to survive a kill right after."""

    def close(self) -> None: ...


@runtime_checkable
class ShowsSamples(Protocol):
    """A tracker that shows samples of the validation, as a table where the service has tables."""

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Called before the metrics of the step."""


def package(name: str) -> Any:
    """The package of a logger. Raises ConfigError, with the remedy, if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ConfigError(
            f"trainer.logger={name} needs the package {name!r}: pip install 'verl-sync[{name}]' ({exc})"
        ) from exc


class WandbTracker:
    """Weights & Biases. Has one row per step: of a step that is repeated it keeps the first one, and says so."""

    def __init__(self, run: Run) -> None:
        self._wandb, known = package("wandb"), run.known_as("wandb")
        self._run = self._wandb.init(
            project=run.project_name,
            name=run.experiment_name,
            config=dict(run.config),
            dir=str(writable(run.output_dir)),
            **({"id": known, "resume": "allow"} if known else {}),
        )
        run.remember("wandb", self._run.id)
        self._rows: list[list[Any]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """A row for each step, as verl has it; all rows again, because a table cannot be changed."""
        self._rows.append([step, *(value for sample in samples for value in sample)])
        columns = [f"{name}_{number}" for number in range(1, len(samples) + 1) for name in ("input", "output", "score")]
        self._run.log({SAMPLES: self._wandb.Table(columns=["step", *columns], data=self._rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


class SwanlabTracker:
    """SwanLab; files in SWANLAB_LOG_DIR, or `<output_dir>/swanlab`."""

    def __init__(self, run: Run) -> None:
        self._swanlab, known = package("swanlab"), run.known_as("swanlab")
        started = self._swanlab.init(
            project=run.project_name,
            experiment_name=run.experiment_name,
            config=dict(run.config),
            logdir=str(writable(Path(os.environ.get("SWANLAB_LOG_DIR") or run.output_dir / "swanlab"))),
            **({"id": known, "resume": "allow"} if known else {}),
        )
        if name := getattr(started, "id", None):  # which older versions do not have
            run.remember("swanlab", name)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        table = self._swanlab.echarts.Table()
        table.add(["step", "input", "output", "score"], [[step, *sample] for sample in samples])
        self._swanlab.log({SAMPLES: table}, step=step)

    def close(self) -> None:
        self._swanlab.finish()


class MlflowTracker:
    """MLflow; without MLFLOW_TRACKING_URI a database in `<output_dir>/mlflow.db`, and files beside it.

    MLFLOW_RUN_ID is a run to go on with."""

    def __init__(self, run: Run) -> None:
        self._mlflow, known = package("mlflow"), run.known_as("mlflow")
        directory = None
        if not self._mlflow.is_tracking_uri_set():
            directory = writable(run.output_dir).resolve()
            self._mlflow.set_tracking_uri(f"sqlite:///{directory / 'mlflow.db'}")
            if self._mlflow.get_experiment_by_name(run.project_name) is None:
                self._mlflow.create_experiment(run.project_name, artifact_location=(directory / "mlflow").as_uri())
        self._mlflow.set_experiment(run.project_name)
        started = self._mlflow.start_run(run_id=known, run_name=None if known else run.experiment_name)
        run.remember("mlflow", started.info.run_id)
        if started.data.params:  # those of a run that goes on, which cannot be changed
            return
        parameters = [(mlflow_name(name), str(value)[:MLFLOW_VALUE]) for name, value in flat(run.config)]
        for start in range(0, len(parameters), MLFLOW_PARAMETERS):
            self._mlflow.log_params(dict(parameters[start : start + MLFLOW_PARAMETERS]))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics({mlflow_name(name): value for name, value in metrics.items()}, step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        rows = [{"step": step, "input": each.prompt, "output": each.answer, "score": each.score} for each in samples]
        self._mlflow.log_text(json.dumps(rows, indent=2), f"val_step{step}.json")

    def close(self) -> None:
        self._mlflow.end_run()


class TrackioTracker:
    """Trackio, which knows a run by its name."""

    def __init__(self, run: Run) -> None:
        self._trackio = package("trackio")
        resume = "allow" if run.resume_step else "never"
        self._trackio.init(project=run.project_name, name=run.experiment_name, config=dict(run.config), resume=resume)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(metrics), step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        traces = [
            self._trackio.Trace(
                messages=[{"role": "user", "content": each.prompt}, {"role": "assistant", "content": each.answer}],
                metadata={"source": "validation_generations", "sample_index": index, "score": each.score},
            )
            for index, each in enumerate(samples)
        ]
        self._trackio.log({SAMPLES: traces}, step=step)

    def close(self) -> None:
        self._trackio.finish()


class ClearmlTracker:
    """ClearML: what stands before the first slash of a metric is the title of its plot. It has no NaN or infinity."""

    def __init__(self, run: Run) -> None:
        known = run.known_as("clearml")
        self._task = package("clearml").Task.init(
            project_name=run.project_name,
            task_name=run.experiment_name,
            reuse_last_task_id=known or False,  # else a run overwrites the one of the same name before it
            continue_last_task=0 if known else False,  # with True, steps would be counted from the last one
            output_uri=False,
            # Its thread runs git while ClearML forks: the fork inherits a pipe of that, and `close` waited for ever.
            auto_connect_frameworks={"detect_repository": False},
        )
        run.remember("clearml", self._task.id)
        self._task.connect_configuration(dict(run.config), name="configuration")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        logger = self._task.get_logger()
        for name, value in metrics.items():
            title, _, series = name.partition("/")
            if math.isfinite(value):
                logger.report_scalar(title, series or title, value, step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        rows = [["step", "input", "output", "score"], *([step, *sample] for sample in samples)]
        self._task.get_logger().report_table("Validation", "Validation generations", iteration=step, table_plot=rows)

    def close(self) -> None:
        self._task.close()


MLFLOW_VALUE, MLFLOW_PARAMETERS = 500, 100
"""The most characters of a parameter, and parameters of a request, that every version of MLflow accepts."""
SERVICES: dict[str, Callable[[Run], Tracker]] = {
    "wandb": WandbTracker,
    "swanlab": SwanlabTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
    "clearml": ClearmlTracker,
}


def flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf by its dotted name."""
    for name, value in values.items():
        dotted = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping) and value:
            yield from flat(value, dotted)
        else:
            yield dotted, value


def mlflow_name(name: str) -> str:
    """`name` with the characters and slashes that MLflow takes. Names of validation have `@`, and what data sources are
    called."""
    parts = re.sub(r"[^/\w.\- ]", "_", name.replace("@", "_at_")).split("/")
    return "/".join(part for part in parts if part.strip(".")) or "_"


def writable(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"the output directory {directory} cannot be made: {exc}") from exc
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"the output directory {directory} is not writable")
    return directory
