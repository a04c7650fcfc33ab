"""Sends the metrics of a run to the backends of `trainer.logger`. Runs on the driver."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from verl.checkpoint_engine.support import records
from verl.utils.config import ConfigError, did_you_mean
from verl.utils.console import StepConsole
from verl.utils.tracking_services import SAMPLES, SERVICES, Histogram, Run, Sample, ShowsSamples, Tracker, writable

METRICS_FILE = "metrics.jsonl"
logger = logging.getLogger(__name__)


class Tracking:
    """Sends the metrics of every step to all backends. A context manager: leaving it closes them.

    A backend that fails later, with a full disk or a service that is away, is logged and does not end the run.

    Raises ConfigError at construction, after closing all backends, for an unknown backend, a missing package or an
    output directory that cannot be written.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        backends: Sequence[str],
        output_dir: str | os.PathLike[str],
        config: Mapping[str, Any],
        *,
        total_steps: int | None = None,
        resume_step: int = 0,
        also: Sequence[Tracker] = (),
    ) -> None:
        """`also` are further destinations, which the caller made and closes."""
        for backend in backends:
            if backend not in BACKENDS:
                raise ConfigError(f"trainer.logger={backend!r} is not known.{did_you_mean(backend, BACKENDS)}")
        run = Run(
            project_name=project_name,
            experiment_name=experiment_name,
            output_dir=Path(output_dir),
            config=config,
            total_steps=total_steps,
            resume_step=resume_step,
        )
        self._trackers: list[Tracker] = []
        with ExitStack() as undo:
            for backend in dict.fromkeys(backends):
                tracker = _started(backend, run)
                undo.callback(tracker.close)
                self._trackers.append(tracker)
            self._closing = undo.pop_all()
        self._trackers += also

    def log(self, metrics: Mapping[str, float], step: int, histograms: Mapping[str, Histogram] | None = None) -> None:
        """Call once per step with all of its metrics: backends may keep one record per step.

        Only TensorBoard gets `histograms`.
        """
        scalars = {name: float(value) for name, value in metrics.items()}
        for tracker in self._trackers:
            with _surviving(tracker, f"metrics of step {step}"):
                if isinstance(tracker, TensorboardTracker):
                    tracker.draw(histograms or {}, step)
                tracker.log(scalars, step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Show samples of the validation at `step` where the service can. Called before `log` of that step."""
        for tracker in self._trackers:
            if isinstance(tracker, ShowsSamples):
                with _surviving(tracker, f"samples of step {step}"):
                    tracker.log_samples(samples, step)

    def show_phase(self, text: str) -> None:
        """Show the present phase on the console: `gen 120/512 answers, 3.1k tok/s`. Called from any thread."""
        for tracker in self._trackers:
            if isinstance(tracker, StepConsole):
                tracker.show_phase(text)

    def go_back(self, step: int) -> None:
        """Drop the records of steps after `step` from files, because the run repeats them. Services get both."""
        for tracker in self._trackers:
            if isinstance(tracker, (JsonlTracker, TensorboardTracker)):
                tracker.go_back(step)

    def close(self) -> None:
        """Close every backend, even if one fails. Idempotent."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class JsonlTracker:
    """`<output_dir>/metrics.jsonl`: one object per step, `{"step": 3, "actor/pg_loss": 0.1}`; NaN and inf are null.

    Records of steps that the run repeats, or that are another run's, are not mixed with its own: the old file is kept
    as `metrics-<n>.jsonl`, and only records up to `resume_step` are copied to the new one.
    """

    def __init__(self, run: Run) -> None:
        self._path = writable(run.output_dir) / METRICS_FILE
        self._resume_step = run.resume_step
        records.carry_over(self._path, lambda record: run.resume_step > 0 and _step(record) <= run.resume_step)

    def go_back(self, step: int) -> None:
        """Keep the records up to `step`; if there are later ones, keep the whole file beside the new one."""
        self._resume_step = step
        records.carry_over(self._path, lambda record: _step(record) <= step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        if step == self._resume_step > 0:
            self._add_to_last(finite)
        else:
            records.append(self._path, [records.encoded({"step": step, **finite})])

    def _add_to_last(self, metrics: Mapping[str, float | None]) -> None:
        """What is measured again before training goes on belongs to the record of the step that it goes on from."""
        found = records.read(self._path)[0] if self._path.exists() else []
        if not found or found[-1]["step"] != self._resume_step:
            found.append({"step": self._resume_step})
        found[-1] |= metrics
        records.rewrite(self._path, found)

    def close(self) -> None:
        """Do nothing: no file is open between two steps."""


class TensorboardTracker:
    """Event files in TENSORBOARD_DIR, or `<output_dir>/tensorboard`."""

    def __init__(self, run: Run) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as exc:
            raise ConfigError(
                "trainer.logger=tensorboard needs the package 'tensorboard': pip install tensorboard"
            ) from exc
        directory = Path(os.environ.get("TENSORBOARD_DIR") or run.output_dir / "tensorboard")
        self._make = partial(SummaryWriter, str(writable(directory)))
        self._writer = self._make(purge_step=run.resume_step + 1 if run.resume_step else None)
        self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=2, default=str)}\n```")

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        text = "\n\n".join(f"{each.score:g}: {each.prompt}\n\n{each.answer}" for each in samples)
        self._writer.add_text(SAMPLES, text, step)

    def draw(self, histograms: Mapping[str, Histogram], step: int) -> None:
        """Write the histograms. Their values are unknown, so sums are computed from the limits."""
        for name, histogram in histograms.items():
            limits, counts = np.array(histogram.limits), np.array(histogram.counts)
            self._writer.add_histogram_raw(
                name,
                min=0.0,
                max=float(limits[-1]),
                num=int(counts.sum()),
                sum=float(counts @ limits),
                sum_squares=float(counts @ limits**2),
                bucket_limits=limits.tolist(),
                bucket_counts=counts.tolist(),
                global_step=step,
            )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def go_back(self, step: int) -> None:
        self._writer.close()
        self._writer = self._make(purge_step=step + 1)

    def close(self) -> None:
        self._writer.close()


def _console(run: Run) -> StepConsole:
    return StepConsole(total_steps=run.total_steps, first_step=run.resume_step)


BACKENDS: dict[str, Callable[[Run], Tracker]] = {
    "console": _console,
    "jsonl": JsonlTracker,
    "tensorboard": TensorboardTracker,
    **SERVICES,
}


def _started(backend: str, run: Run) -> Tracker:
    """Raises ConfigError for whatever keeps a service from starting, such as a login that it lacks."""
    try:
        return BACKENDS[backend](run)
    except ConfigError:
        raise
    except Exception as exc:
        what = (str(exc).strip() or "no reason is given").splitlines()[0]
        raise ConfigError(f"trainer.logger={backend} cannot start: {type(exc).__name__}: {what}") from exc


@contextmanager
def _surviving(tracker: Tracker, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        if isinstance(tracker, (StepConsole, JsonlTracker, TensorboardTracker)) and not isinstance(exc, OSError):
            raise  # a mistake of ours; each service has errors of its own
        logger.error("%s are not with %s: %s: %s", what, type(tracker).__name__, type(exc).__name__, exc)  # noqa: TRY400


def missing_packages(backends: Sequence[str]) -> list[str]:
    """A line for each service whose package is missing on this machine."""
    return [
        f"trainer.logger={name} needs the package {name!r} where the run starts: pip install 'verl-sync[{name}]'"
        for name in dict.fromkeys(backends)
        if name in SERVICES and find_spec(name) is None
    ]


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl in file order; omits an incomplete last line after a kill.

    Raises FileNotFoundError, and ValueError naming the line for anything else that is not a record.
    """
    found = records.read(Path(path), "record of metrics")[0]
    for number, record in enumerate(found, start=1):
        if not isinstance(record.get("step"), int):
            raise ValueError(f"{path}, line {number}: a record without a step: {str(record)[:80]!r}")  # noqa: TRY004
    return found


def _step(record: Mapping[str, Any]) -> float:
    """What has no step is of no step that counts."""
    step = record.get("step")
    return step if isinstance(step, int) else math.inf
