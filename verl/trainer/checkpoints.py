"""Training checkpoints on disk: `<output_dir>/global_step_N`, complete or absent.

    global_step_40/
        actor/            what the training engine writes (torch distributed checkpoint, huggingface/)
        critic/           the same of the critic, if there is one
        data.pt           position in the training data
        trainer.json      step, KL coefficient, held-out rewards so far; when it was written, what its run came from
        digests.json      of the last two, and of the ranks' own, which are beside their files
    latest_checkpointed_iteration.txt

A checkpoint is written under a temporary name and renamed; the pointer is replaced after that. A run that is killed at
any moment, or finds the disk full, has its last complete checkpoint. Nothing that is read back can run code.
"""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.checkpoint_engine.support.files import sync_to_disk
from verl.utils.config import ConfigError
from verl.utils.disk import full_disk_told
from verl.utils.file_digests import damaged, noted_in, write_digests
from verl.workers.config import CheckpointConfig, TrainerConfig

logger = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"
RECORD = "trainer.json"
_NAME = re.compile(r"global_step_(\d{1,18})", re.ASCII)
PARTS = ("", "actor", "critic")
"""Directories in a checkpoint whose files have digests; "" is the checkpoint's own."""
COMPARED_NBYTES = 2**32
"""Larger directories are compared by size here; the ranks that read them compare digests, each of a part."""
_AGAIN = "set trainer.resume_mode=disable to start again"


@dataclass(frozen=True)
class TrainerState:
    """The driver's state in a checkpoint. `dataloader` is the position in the data: plain values and tensors."""

    step: int
    dataloader: dict[str, Any]
    kl_coef: float
    rewards_before: dict[str, float]


class CheckpointDirectory:
    """The checkpoints of one run. Used on the driver."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        # Trainer ranks on other hosts have other working directories.
        self.root = Path(config.output_dir).absolute()
        self._branched_from: str | None = None
        """The checkpoint that `resume_from_path` named, for this run or one that it goes on from."""
        self._written: Path | None = None
        """What `publish` has to do."""
        self.keeps_all = False
        """Old ones are not deleted: what was saved last may be no good."""
        self.last: Path | None = None
        """The one that was published last, by this object."""

    @property
    def last_step(self) -> int | None:
        """The step of `last`."""
        return None if self.last is None else int(self.last.name.removeprefix("global_step_"))

    def has(self, path: Path) -> bool:
        """Whether the checkpoint `path` is one of this run's directory."""
        return path.resolve().parent == self.root.resolve()

    def would_resume_from(self) -> Path | None:
        """The checkpoint that `find` returns if it is whole. Reads no checkpoint, and changes nothing on disk.

        Raises ConfigError if `resume_from_path` is none.
        """
        pointer, mode = self.root / LATEST, self._config.resume_mode
        if mode == "resume_path":
            path = Path(str(self._config.resume_from_path)).absolute()
            if not any((each / RECORD).is_file() for each in (path, _replaced(path))):
                raise ConfigError(f"trainer.resume_from_path={path} is not a checkpoint: it has no {RECORD}")
            return path
        return self.root / self._pointed_to(pointer) if mode != "disable" and pointer.is_file() else None

    def find(self) -> Path | None:
        """The checkpoint to resume from by `trainer.resume_mode`; None to start from scratch.

        Raises ConfigError if that checkpoint is missing, incomplete or damaged. The error names the newest whole one;
        with `trainer.resume_fallback`, that one is used instead.
        """
        mode = self._config.resume_mode
        if mode == "disable":
            return None
        if mode == "resume_path":
            path = Path(str(self._config.resume_from_path)).absolute()
            self._put_back(path)
            if not (path / RECORD).is_file():
                raise ConfigError(f"trainer.resume_from_path={path} is not a checkpoint: it has no {RECORD}")
            if wrong := _damage(path):
                raise ConfigError(f"trainer.resume_from_path={path} is damaged: {wrong}{self._offer(path)}")
            real = path.resolve()
            self._branched_from = real.name if real.parent == self.root.resolve() else None
            return path
        pointer = self.root / LATEST
        if not pointer.is_file():
            return None
        path = self.root / self._pointed_to(pointer)
        self._put_back(path)
        if not (path / RECORD).is_file():
            path = self._instead_of(path, f"{pointer} points to {path}, which is not a complete checkpoint")
        elif wrong := _damage(path):
            path = self._instead_of(path, f"{pointer} points to {path}, which is damaged: {wrong}")
        self._branched_from = _record(path).get("branched_from")
        return path

    def _instead_of(self, path: Path, why: str) -> Path:
        other = self._newest_whole(but=path)
        if other is None or not self._config.resume_fallback:
            raise ConfigError(f"{why}{self._offer(path)}; {_AGAIN}")
        logger.warning("%s; going on from %s (trainer.resume_fallback=true)", why, other)
        return other

    def _offer(self, path: Path) -> str:
        other = self._newest_whole(but=path)
        if other is None:
            return ""
        take = f"trainer.resume_mode=resume_path trainer.resume_from_path={other}"
        return f". The newest whole one is {other}: set {take}, or trainer.resume_fallback=true"

    def _newest_whole(self, but: Path) -> Path | None:
        others = [path for path in self._found() if path != but and (path / RECORD).is_file()]
        return next((path for path in sorted(others, key=_age, reverse=True) if not _damage(path)), None)

    @contextmanager
    def writing(self, state: TrainerState) -> Iterator[Path]:
        """Context with a directory to which trainer ranks write; `publish` makes it a checkpoint.

        After an error the directory is removed, and the last checkpoint remains. Raises DiskFull if the disk was full.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        final = self.root / f"global_step_{state.step}"
        partial = _partial(final)
        self._delete_remains()
        self._written = None
        try:
            with full_disk_told(partial):
                partial.mkdir()
            yield partial
            record = {
                "step": state.step,
                "kl_coef": state.kl_coef,
                "rewards_before": state.rewards_before,
                "serial": 1 + max((_serial(path) for path in self._found()), default=0),
                "branched_from": self._branched_from,
                "has_digests": True,
            }
            files = {"data.pt": _saved(state.dataloader), RECORD: json.dumps(record).encode()}
            with full_disk_told(partial, sum(map(len, files.values()))):
                for name, content in files.items():
                    (partial / name).write_bytes(content)
                # With the ranks' digests, so that neither these nor a whole part can be missed without a word, and with
                # the adapters, which they write for others.
                theirs = [*noted_in(partial, PARTS), *partial.glob("*/lora_adapter/*")]
                write_digests(partial, [*files, *(str(path.relative_to(partial)) for path in theirs)])
                self._new_pointer.write_text(str(state.step), "utf-8")
                sync_to_disk(partial)
                sync_to_disk(self.root)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._written = final

    def publish(self) -> None:
        """Make the written directory the checkpoint to resume from. Call it when the step's records are on disk.

        Needs no disk space. Does nothing if nothing was written.
        """
        if self._written is None:
            return
        final, self._written = self._written, None
        if final.exists():  # of an earlier run; makes room, but is not lost on the way
            logger.info("%s, of an earlier run, is replaced", final)
            final.rename(_replaced(final))
        _partial(final).rename(final)
        self._new_pointer.rename(self.root / LATEST)
        sync_to_disk(self.root)
        shutil.rmtree(_replaced(final), ignore_errors=True)
        self._delete_old(final)
        self.last = final
        logger.info("checkpoint: %s", final)

    @property
    def _new_pointer(self) -> Path:
        return self.root / f".{LATEST}"

    @staticmethod
    def read(path: Path) -> TrainerState:
        """The driver's state in a checkpoint. Raises ConfigError for files that are no checkpoint's."""
        record = _record(path)
        try:
            import torch

            with warnings.catch_warnings(action="ignore"):
                position = torch.load(path / "data.pt", weights_only=True, map_location="cpu")
        except Exception as exc:  # torch's reader raises whatever it stumbles over
            raise ConfigError(f"{path / 'data.pt'} is not the position of a checkpoint: {_first_line(exc)}") from exc
        try:
            return TrainerState(
                int(record["step"]),
                dict(position),
                float(record["kl_coef"]),
                {str(name): float(value) for name, value in record["rewards_before"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
            raise ConfigError(f"{path / RECORD} is not the record of a checkpoint: {exc!r}") from exc

    def _put_back(self, path: Path) -> None:
        """If a run was killed while it replaced `path`, the earlier one of that name counts again."""
        replaced = _replaced(path)
        if replaced.is_dir() and not path.exists():
            replaced.rename(path)

    def _pointed_to(self, pointer: Path) -> str:
        try:
            name = f"global_step_{pointer.read_text('utf-8').strip()}"
        except UnicodeDecodeError:
            name = ""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{pointer} does not hold the number of a step; {_AGAIN}")
        return name

    def _found(self) -> list[Path]:
        return [path for path in self.root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]

    def _delete_old(self, latest: Path) -> None:
        """Keep `max_actor_ckpt_to_keep` of those that were written last, whatever their steps.

        What the pointer names is one of them. What this run branched from stays beside them: its user named it.
        """
        keep = self._config.max_actor_ckpt_to_keep
        if keep is None or self.keeps_all:
            return
        others = [path for path in self._found() if path.name not in (latest.name, self._branched_from)]
        newest_first = sorted(others, key=_age, reverse=True)
        for path in newest_first[keep - 1 :]:
            doomed = self.root / f".{path.name}.deleted"
            try:
                path.rename(doomed)  # half a checkpoint does not look like one
                shutil.rmtree(doomed)
            except OSError as exc:
                logger.warning("%s, which is old, cannot be deleted: %s", path, exc)

    def _delete_remains(self) -> None:
        """Of runs that were killed while they wrote, replaced or deleted a checkpoint."""
        for path in self.root.glob(".global_step_*.replaced"):
            self._put_back(path.with_name(path.name.removeprefix(".").removesuffix(".replaced")))
        for kind in ("partial", "deleted", "replaced"):
            for path in self.root.glob(f".global_step_*.{kind}"):
                shutil.rmtree(path, ignore_errors=True)


def warn_of_lacking_contents(key: str, contents: CheckpointConfig) -> None:
    """Warn at configuration time if `contents` lacks what a run needs to resume."""
    lacking = [part for part in contents.load_contents if part not in (*contents.save_contents, "hf_model")]
    if lacking:
        logger.warning(
            "%s.save_contents=[%s] lacks %s: no run can resume from these checkpoints. Add it, or remove it from "
            "load_contents",
            key,
            ",".join(contents.save_contents),
            ", ".join(lacking),
        )


def _saved(state: dict[str, Any]) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads((path / RECORD).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{path / RECORD} is not the record of a checkpoint: {exc}") from exc
    if not isinstance(record, dict):
        raise ConfigError(f"{path / RECORD} is not the record of a checkpoint: {str(record)[:40]!r}")
    return record


def _damage(path: Path) -> str:
    """What is wrong with a file of a checkpoint; empty if nothing is, as far as the driver looks."""
    try:
        record = _record(path)
    except ConfigError as exc:
        return str(exc)
    if record.get("has_digests") and not (path / "digests.json").is_file():
        return f"{path / 'digests.json'} is gone"
    found = (damaged(path / part, bytes_up_to=COMPARED_NBYTES) for part in PARTS if (path / part).is_dir())
    return next((wrong for wrong in found if wrong), "")


def _serial(path: Path) -> int:
    """The how-manieth one of its directory it is, by the order of writing; 0 if it does not say."""
    try:
        serial = _record(path).get("serial", 0)
    except ConfigError:
        return 0
    return serial if isinstance(serial, int) else 0


def _age(path: Path) -> tuple[int, float]:
    """In the order of writing. Clocks are asked only about those that do not say."""
    record = path / RECORD
    return _serial(path), (record if record.is_file() else path).stat().st_mtime


def _first_line(exc: Exception) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0]
