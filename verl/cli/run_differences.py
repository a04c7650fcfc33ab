"""Where two runs first differ: settings, and of every step samples, metrics and the checkpoint, in that order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.checkpoint_engine.support import records
from verl.cli.differences import Compared, Difference
from verl.cli.look import Unusable
from verl.cli.run_files import METRICS_FILE, read_settings, read_starts
from verl.cli.samples import KEYS, named_directories, sample_files
from verl.utils.measured import OF_SAMPLES, OF_SETTINGS, is_measured

FIRST = ("prompt_ids", "response_ids", "response_mask", "versions", "log_probs", "score")
"""Columns of a sample in the order in which one causes the next; others follow."""
PER_TOKEN = {"prompt_ids", "response_ids", "response_mask", "versions", "log_probs"}


@dataclass(frozen=True, kw_only=True)
class RunToCompare:
    """What a run wrote, by step. Samples and checkpoints are read when they are compared."""

    directory: Path
    settings: Mapping[str, Any]
    metrics: Mapping[int, Mapping[str, Any]]
    samples: Mapping[str, Mapping[int, Path]]
    """Files by what is in them, and step."""
    checkpoints: Mapping[int, Path]

    @property
    def steps(self) -> set[int]:
        files = [step for each in self.samples.values() for step in each]
        return {*self.metrics, *files, *self.checkpoints}


def read_run_to_compare(directory: Path) -> RunToCompare:
    """Raises Unusable for a directory without a run's metrics, and for files with other content."""
    try:
        found = records.read(directory / METRICS_FILE)[0]
        metrics = {_step(record, directory): record for record in found}
        settings = read_settings(directory)
        starts = read_starts(directory)
    except FileNotFoundError as exc:
        raise Unusable(f"{directory} has no run to compare: there is no {METRICS_FILE}") from exc
    except (OSError, ValueError) as exc:
        raise Unusable(str(exc)) from exc
    checkpoints = {
        int(path.name.removeprefix("global_step_")): path
        for path in directory.glob("global_step_*")
        if path.is_dir() and path.name.removeprefix("global_step_").isdigit()
    }
    return RunToCompare(
        directory=directory,
        settings=settings,
        metrics=metrics,
        samples=_sample_files(directory, settings, starts),
        checkpoints=checkpoints,
    )


def _step(record: Mapping[str, Any], directory: Path) -> int:
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        raise ValueError(f"{directory / METRICS_FILE}: a record has no number of a step: {str(dict(record))[:80]}")  # noqa: TRY004
    return step


def _sample_files(
    directory: Path, settings: Mapping[str, Any], starts: Sequence[Mapping[str, Any]]
) -> dict[str, dict[int, Path]]:
    """By what is in them, and step: those in the directories that the settings name."""
    places = named_directories(directory, settings, starts)
    return {KEYS[key]: {int(path.stem): path for path in sample_files(place)} for key, place in places.items()}


def differing_settings(a: RunToCompare, b: RunToCompare) -> dict[str, tuple[Any, Any]]:
    """Both values of every key that differs; None for a key that a run does not have. Not those of `OF_SETTINGS`."""
    keys = sorted((a.settings.keys() | b.settings.keys()) - OF_SETTINGS)
    both = {key: (a.settings.get(key), b.settings.get(key)) for key in keys}
    return {key: values for key, values in both.items() if values[0] != values[1]}


def first_differences(a: RunToCompare, b: RunToCompare, compared: Compared) -> tuple[int, list[Difference]] | None:
    """The first step that differs, and all that differs in it; None if none does.

    Whatever only one run kept, as checkpoints of other steps, is not compared; a step without metrics in one of the two
    is a difference. Raises Unusable for damaged files.
    """
    for step in sorted(a.steps | b.steps):
        found = [*_of_samples(a, b, step, compared), *_of_metrics(a, b, step, compared)]
        if step in a.checkpoints and step in b.checkpoints:
            from verl.cli.checkpoint_differences import checkpoint_differences

            compared.checkpoints.append(step)
            found += checkpoint_differences(a.checkpoints[step], b.checkpoints[step], compared)
        if found:
            return step, found
    return None


def _of_metrics(a: RunToCompare, b: RunToCompare, step: int, compared: Compared) -> Iterator[Difference]:
    ours, theirs = a.metrics.get(step), b.metrics.get(step)
    if ours is None and theirs is None:
        return
    if ours is None or theirs is None:
        of_step = [None if each is None else "there" for each in (ours, theirs)]
        yield Difference(kind="metrics", what="the step", a=of_step[0], b=of_step[1])
        return
    compared.steps += 1
    for name in sorted(ours.keys() | theirs.keys()):
        if is_measured(name):
            continue
        compared.metrics += 1
        if (name in ours) != (name in theirs) or ours.get(name) != theirs.get(name):
            yield Difference(kind="metrics", what=name, a=ours.get(name), b=theirs.get(name))


def _of_samples(a: RunToCompare, b: RunToCompare, step: int, compared: Compared) -> Iterator[Difference]:
    for what in KEYS.values():
        paths = [run.samples.get(what, {}).get(step) for run in (a, b)]
        if paths[0] is None or paths[1] is None:
            continue
        ours, theirs = (_read_samples(path) for path in paths if path is not None)
        yield from _between(what, ours, theirs, compared)


def _between(
    what: str, ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], compared: Compared
) -> Iterator[Difference]:
    """Samples are matched by their place. Those with the same names in another order are told as that."""
    if len(ours) != len(theirs):
        yield Difference(kind="samples", what=f"number of {what}", a=len(ours), b=len(theirs))
        return
    uids = [[row.get("uid") for row in rows] for rows in (ours, theirs)]
    if uids[0] != uids[1] and sorted(map(str, uids[0])) == sorted(map(str, uids[1])):
        place = next(index for index, both in enumerate(zip(*uids, strict=True)) if both[0] != both[1])
        yield Difference(kind="samples", what=f"order of {what}: uid", a=uids[0][place], b=uids[1][place], place=place)
        return
    for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        compared.samples += 1
        found = _of_sample(our, their)
        if found is not None:
            column, token = found
            values = [row.get(column) if token is None else _at(row[column], token) for row in (our, their)]
            yield Difference(
                kind="samples",
                what=f"{what.removesuffix('s')} {index}: {column}",
                a=values[0],
                b=values[1],
                place=token,
                uid=our.get("uid"),
            )


def _of_sample(our: Mapping[str, Any], their: Mapping[str, Any]) -> tuple[str, int | None] | None:
    """The first column that differs, and the first token in it."""
    columns = [*FIRST, *sorted((our.keys() | their.keys()) - set(FIRST) - OF_SAMPLES)]
    for column in columns:
        ours, theirs = our.get(column), their.get(column)
        if (column in our) == (column in their) and ours == theirs:
            continue
        if column in PER_TOKEN and isinstance(ours, list) and isinstance(theirs, list):
            pairs = enumerate(zip(ours, theirs, strict=False))
            shorter = min(len(ours), len(theirs))
            return column, next((index for index, both in pairs if both[0] != both[1]), shorter)
        return column, None
    return None


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else None


def _read_samples(path: Path) -> list[dict[str, Any]]:
    try:
        return records.read(path, "sample")[0]
    except (OSError, ValueError) as exc:
        raise Unusable(str(exc)) from exc
