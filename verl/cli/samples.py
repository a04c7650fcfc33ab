"""Samples that a run has written, with the version of the weights that generated each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from verl.checkpoint_engine.support import records
from verl.cli.look import Unusable
from verl.cli.run_files import RunFiles

Decode = Callable[[Sequence[int]], str]
MOST_TOKENS = 2000
"""The most tokens of a sample that are shown."""


KEYS = {"trainer.rollout_data_dir": "training samples", "trainer.validation_data_dir": "validation samples"}
"""By key of the directory: what is in it."""


def sample_directories(run: RunFiles) -> list[Path]:
    """The directories with samples below a run's output directory, and those that its configuration names."""
    named = named_directories(run.directory, run.settings, run.starts).values()
    found = {path.resolve(): path for path in (*directories_below(run.directory), *filter(sample_files, named))}
    return list(found.values())


def directories_below(run: Path) -> list[Path]:
    """Those with samples below a run's output directory."""
    found = (path for path in sorted(run.iterdir()) if path.is_dir() and not path.name.startswith("global_step_"))
    return [path for path in found if sample_files(path)]


def named_directories(run: Path, settings: Mapping[str, Any], starts: Sequence[Mapping[str, Any]]) -> dict[str, Path]:
    """By key of `KEYS`: the directory that the settings name, also where the run was moved with one below it."""
    found = {}
    started_in = Path(str(starts[-1].get("directory", "."))) if starts else Path()
    below = {path.name: path for path in directories_below(run)}
    for key in KEYS:
        given = settings.get(key)
        if not isinstance(given, str):
            continue
        named = started_in / given
        place = named if named.is_dir() else below.get(named.name)
        if place is not None:
            found[key] = place
    return found


def read_samples(directories: Sequence[Path], *, steps: int, per_step: int, decode: Decode | None) -> list[Any]:
    """The first `per_step` samples of the last `steps` files of every directory.

    Raises Unusable for a directory without samples and for a file with other content.
    """
    found: list[Any] = []
    for directory in directories:
        files = sample_files(directory)
        if not files:
            raise Unusable(f"{directory} has no file of samples, like 3.jsonl")
        for file in files[-steps:] if steps else ():
            try:
                rows = records.read(file, "sample")[0]
                found += [_shown(row, directory.name, decode) for row in rows[:per_step]]
            except (OSError, ValueError, TypeError, AttributeError) as exc:
                raise Unusable(f"{file}: {exc}") from exc
    return found


def sample_files(directory: Path) -> list[Path]:
    """One per step, in the order of steps."""
    return sorted((path for path in directory.glob("*.jsonl") if path.stem.isdigit()), key=lambda path: int(path.stem))


def decoder(given: Path | None, run: RunFiles) -> Decode | None:
    """Converts token ids to text by `tokenizer.json` in `given`, or else in the run's newest checkpoint or its last
    start's record. None without one."""
    if given is not None and not (given / "tokenizer.json").is_file():
        raise Unusable(f"--tokenizer {given}: there is no tokenizer.json")
    saved = sorted(run.directory.glob("global_step_*/**/tokenizer.json"), key=lambda path: path.stat().st_mtime)
    recorded = [Path(str(start["tokenizer"])) / "tokenizer.json" for start in run.starts if start.get("tokenizer")]
    known = [path for path in (*recorded, *saved) if path.is_file()]
    path = given / "tokenizer.json" if given is not None else known[-1] if known else None
    if path is None:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as exc:  # the package raises nothing narrower
        raise Unusable(f"{path}: {exc}") from exc
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _shown(row: Mapping[str, Any], where: str, decode: Decode | None) -> dict[str, Any]:
    return {
        "where": where,
        "step": row.get("step"),
        "source": row.get("data_source"),
        "prompt": _text(row.get("prompt")),
        "response": _text(row.get("response")),
        "truth": row.get("ground_truth"),
        "score": row.get("score"),
        "stop": row.get("stop_reason"),
        "replicas": sorted({str(name) for name, *_ in row.get("replicas") or ()}),
        "pieces": list(_pieces(row, decode)),
        "tokens": len(row.get("response_ids") or ()),
    }


def _pieces(row: Mapping[str, Any], decode: Decode | None) -> Iterator[dict[str, Any]]:
    """Runs of tokens that one version generated, or that were inserted; nothing where versions are not recorded."""
    ids, versions = row.get("response_ids"), row.get("versions")
    if not ids or not versions:
        return
    together = zip(ids[:MOST_TOKENS], versions, strict=False)
    for version, run in groupby(together, key=lambda token: token[1]):
        own = [token for token, _ in run]
        yield {"version": version, "count": len(own), "text": decode(own) if decode else " ".join(map(str, own)) + " "}


def _text(value: Any) -> str:
    """A prompt is a list of messages."""
    if isinstance(value, (list, tuple)):
        return "\n".join(
            f"{message.get('role', '')}: {message.get('content', '')}" if isinstance(message, Mapping) else str(message)
            for message in value
        )
    return "" if value is None else str(value)
