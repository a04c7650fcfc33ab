"""Services that store the metrics of runs, each with its own package, environment variables and login."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verl.utils.config import ConfigError


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


@dataclass(frozen=True)
class Histogram:
    """The number of values up to each limit, and above the limit before."""

    limits: Sequence[float]
    counts: Sequence[int]


class Tracker(Protocol):
    """One destination of metrics. Made before the run starts; its constructor raises ConfigError if it cannot work."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record one step, durably enough to survive a kill right after."""

    def close(self) -> None: ...


def package(name: str) -> Any:
    """The package of a logger. Raises ConfigError, with the remedy, if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ConfigError(
            f"trainer.logger={name} needs the package {name!r}: pip install 'verl-sync[{name}]' ({exc})"
        ) from exc


class WandbTracker:
    """Weights & Biases."""

    def __init__(self, run: Run) -> None:
        self._run = package("wandb").init(
            project=run.project_name,
            name=run.experiment_name,
            config=dict(run.config),
            dir=str(writable(run.output_dir)),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class SwanlabTracker:
    """SwanLab; files in `<output_dir>/swanlab`."""

    def __init__(self, run: Run) -> None:
        self._swanlab = package("swanlab")
        self._swanlab.init(
            project=run.project_name,
            experiment_name=run.experiment_name,
            config=dict(run.config),
            logdir=str(writable(run.output_dir / "swanlab")),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()


class MlflowTracker:
    """MLflow; without MLFLOW_TRACKING_URI a database in `<output_dir>/mlflow.db`."""

    def __init__(self, run: Run) -> None:
        self._mlflow = package("mlflow")
        if not self._mlflow.is_tracking_uri_set():
            self._mlflow.set_tracking_uri(f"sqlite:///{writable(run.output_dir).resolve() / 'mlflow.db'}")
        self._mlflow.set_experiment(run.project_name)
        self._mlflow.start_run(run_name=run.experiment_name)
        parameters = [(name, str(value)[:MLFLOW_VALUE]) for name, value in flat(run.config)]
        for start in range(0, len(parameters), MLFLOW_PARAMETERS):
            self._mlflow.log_params(dict(parameters[start : start + MLFLOW_PARAMETERS]))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        # It takes no @ in names, which those of validation have.
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class TrackioTracker:
    """Trackio."""

    def __init__(self, run: Run) -> None:
        self._trackio = package("trackio")
        self._trackio.init(project=run.project_name, name=run.experiment_name, config=dict(run.config))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


class ClearmlTracker:
    """ClearML: what stands before the first slash of a metric is the title of its plot."""

    def __init__(self, run: Run) -> None:
        self._task = package("clearml").Task.init(
            project_name=run.project_name,
            task_name=run.experiment_name,
            continue_last_task=run.resume_step > 0,
            output_uri=False,
        )
        self._task.connect_configuration(dict(run.config), name="configuration")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        logger = self._task.get_logger()
        for name, value in metrics.items():
            title, _, series = name.partition("/")
            logger.report_scalar(title, series or title, value, step)

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


def writable(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"the output directory {directory} cannot be made: {exc}") from exc
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"the output directory {directory} is not writable")
    return directory
