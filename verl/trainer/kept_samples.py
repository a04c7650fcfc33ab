"""Keeps generated samples that are in no checkpoint yet, in files that outlive the driver: `rollout.keep_tokens`.

    <output_dir>/kept_samples/    0700; removed when the run is complete
        00000012.samples          0600; for the steps after step 12; records in the order of writing
        run                       0600; names the run, and all that resume it

The first record of a file says whose it is. A run that is resumed from its checkpoint of step 12 reads the files from
number 12 on. It trains on them in their order, so that it repeats the steps that are undone, with their samples, before
it generates others.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from verl.checkpoint_engine.support.memory import in_words
from verl.protocol import DataProto
from verl.trainer.plain_state import packed, unpacked
from verl.utils.config import ConfigError
from verl.utils.framed import append, cut_to_whole, framed, frames

logger = logging.getLogger(__name__)

NAME = "kept_samples"
TOOL_CALLS = "tool_calls"
"""Beside it: calls of tools under way, which agent loops write."""
SHARE = 10
"""Samples take at most this part of the disk's free space and of the host's free memory, which has to hold them."""
_FILE = re.compile(r"(\d{8})\.samples", re.ASCII)


@dataclass(frozen=True)
class Amount:
    """A number of responses, and of tokens that the policy generated in them."""

    responses: int = 0
    tokens: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.responses + other.responses, self.tokens + other.tokens)

    def __str__(self) -> str:
        return f"{self.responses} responses of {self.tokens} tokens"

    def metrics(self, what: str) -> dict[str, float]:
        return {f"rollout/{what}_responses": float(self.responses), f"rollout/{what}_tokens": float(self.tokens)}


@dataclass(frozen=True)
class Record:
    """What was appended to the file with this number."""

    number: int
    content: Any
    amount: Amount


@dataclass
class Found:
    """The records of a run that was interrupted, in the order of writing, and what of it cannot be used."""

    records: list[Record]
    last: int
    """The number of the last file, to which the next records belong if their order is to be that of writing."""
    dropped: dict[str, Amount] = field(default_factory=dict)
    """By reason."""

    def drop(self, why: str, amount: Amount) -> None:
        self.dropped[why] = self.dropped.get(why, Amount()) + amount

    def tell(self, taken: Amount) -> None:
        """Log in one line what becomes of all of it."""
        if taken.responses or self.lost.responses:
            reasons = "".join(f"; dropped: {amount}, {why}" for why, amount in self.dropped.items())
            logger.info("trains on %s from before the restart (rollout.keep_tokens)%s", taken, reasons)

    @property
    def lost(self) -> Amount:
        return sum(self.dropped.values(), Amount())


class KeptSamples:
    """The files of one run. Can be pickled; one process at a time appends, another one may read and delete.

    `append` never fails: a run does not depend on it. After an error of the disk it keeps nothing more.
    """

    def __init__(self, output_dir: Path, identity: Mapping[str, str]) -> None:
        """`identity`: digests, by name, of all that has to be the same in the run that reads these samples."""
        self.directory = output_dir.absolute() / NAME
        self._identity = dict(identity)
        disk = shutil.disk_usage(next(path for path in self.directory.parents if path.is_dir()))
        self.most_nbytes = min(disk.free, psutil.virtual_memory().available) // SHARE
        self._full: int | None = None
        """The number of the file that is incomplete, because there was no room for the rest."""
        self._is_over = False

    def run(self, *, anew: bool = False) -> str:
        """Names the run, and all that resume it, with 32 hexadecimal digits. `anew`: by another name from now on."""
        path = self.directory / "run"
        if not anew:
            with suppress(OSError), path.open("rb") as file:
                for head, *_ in frames(file):
                    if head.get("run") == self._identity:
                        return str(head["name"])
        name = uuid.uuid4().hex
        with suppress(OSError):  # then nobody resumes it, which is what `append` says
            path.unlink(missing_ok=True)
            append(path, b"", {"run": self._identity, "name": name})
        return name

    def append(self, number: int, content: Any, generated: DataProto) -> None:
        """Append `content`, made of plain values and batches, whose tokens `generated` has."""
        if self._is_over or self._full == number:
            return
        try:
            payload = packed(content)
            amount = amount_of(generated)
            record = framed({"responses": amount.responses, "tokens": amount.tokens}, payload)
            used = self._nbytes()
            if used + len(record) > self.most_nbytes:
                self._full = number
                record = framed({"full": True})
                logger.warning(
                    "samples take %s, and may take %s: until the next checkpoint no others are kept for a restart "
                    "(rollout.keep_tokens)",
                    *(in_words(used), in_words(self.most_nbytes)),
                )
            self._write(number, record)
        except (OSError, TypeError) as exc:  # the disk; a value that is neither plain nor a batch
            self._give_up(exc)

    def begin(self, number: int) -> None:
        """Make or mend the file to which the next records go: its last writer may have died in the middle of one."""
        if self._is_over:
            return
        path = self._path(number)
        try:
            if path.exists():
                cut_to_whole(path)
            self._write(number, b"")
        except OSError as exc:
            self._give_up(exc)

    def end(self) -> None:
        """Delete all; this process keeps nothing more."""
        self._is_over = True
        discard(self.directory.parent)

    def _write(self, number: int, record: bytes) -> None:
        append(self._path(number), record, {"run": self._identity})

    def _give_up(self, why: Exception) -> None:
        logger.warning("samples are not kept for a restart (rollout.keep_tokens): %s", why)
        self.end()

    def read(self, first: int) -> Found:
        """The records in the files from number `first` on, if that one is there. Deletes what is not returned."""
        found = Found([], first)
        why = "" if self._path(first).exists() else f"the checkpoint is of step {first}, and they are of later ones"
        for number, path in self._files():
            if number < first:  # the checkpoint has them
                path.unlink()
                continue
            end = 0
            if not why:
                why, end = self._read(number, path, found)
            if why:
                self._count(path, end, why, found)
                if not end:
                    path.unlink()
                    continue
                os.truncate(path, end)
            found.last = number
        return found

    def forget_from(self, number: int) -> None:
        for other, path in self._files():
            if other >= number:
                path.unlink(missing_ok=True)

    def forget_before(self, number: int) -> None:
        """A checkpoint of step `number` is complete."""
        for other, path in self._files():
            if other < number:
                path.unlink(missing_ok=True)

    def _read(self, number: int, path: Path, found: Found) -> tuple[str, int]:
        """Add the records of a file. Returns why those that follow do not count, if so, and where the last that does
        ends."""
        end = 0
        with path.open("rb") as file:
            for head, payload, after in frames(file):
                if "run" in head:
                    other = [name for name in self._identity if head["run"].get(name) != self._identity[name]]
                    if other:
                        return f"of a run with another {', another '.join(other)}", 0
                elif "full" in head:
                    return "for which there was no room", end
                elif not end:
                    return "of an unknown run", 0
                else:
                    try:
                        content = unpacked(payload)
                    except ConfigError as exc:
                        return f"which cannot be read ({exc})", end
                    found.records.append(Record(number, content, Amount(head["responses"], head["tokens"])))
                end = after
            is_whole = end == path.stat().st_size
        return ("" if is_whole else "damaged, or after a damaged one"), end

    @staticmethod
    def _count(path: Path, start: int, why: str, found: Found) -> None:
        """Counts records that are dropped, as far as they say how large they are."""
        with path.open("rb") as file:
            file.seek(start)
            for head, _, _ in frames(file, verify=False):
                if "responses" in head:
                    with suppress(KeyError, ValueError, TypeError):
                        found.drop(why, Amount(int(head["responses"]), int(head["tokens"])))

    def _nbytes(self) -> int:
        nbytes = 0
        for _, path in self._files():
            with suppress(FileNotFoundError):  # a checkpoint has just made it superfluous
                nbytes += path.stat().st_size
        return nbytes

    def _files(self) -> list[tuple[int, Path]]:
        if not self.directory.is_dir():
            return []
        named = ((_FILE.fullmatch(path.name), path) for path in self.directory.iterdir())
        return sorted((int(match[1]), path) for match, path in named if match)

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:08}.samples"


def discard_calls(output_dir: Path) -> None:
    """Delete `TOOL_CALLS` of a complete run."""
    shutil.rmtree(output_dir / TOOL_CALLS, ignore_errors=True)


def discard(output_dir: Path, *, before_s: float | None = None) -> None:
    """Delete what a run left in its output directory; with `before_s`, seconds since 1970, what was written before."""
    directory = output_dir / NAME
    if before_s is None:
        shutil.rmtree(directory, ignore_errors=True)
        return
    for path in directory.glob("*"):
        if path.stat().st_mtime < before_s:
            path.unlink()


def amount_of(generated: DataProto) -> Amount:
    """Of a batch of responses."""
    assert generated.batch is not None
    return Amount(len(generated), int(generated.batch["response_mask"].sum()))


def are_same(one: Any, other: Any) -> bool:
    """Whether two values of `to_plain` are equal."""
    import torch

    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(are_same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other) and type(one) is type(other)
