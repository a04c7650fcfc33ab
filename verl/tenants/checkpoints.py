"""Versions of adapters as files: peft's two, the optimizer's state where one is saved, and `version.json`.

    OUTPUT/<owner>/<training run>/weights/<name>/            with the optimizer
                                  sampler_weights/<name>/    without

A version is named by the digest of peft's files, and read only if they still have it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors.torch import load, save, save_file

from verl.checkpoint_engine.support.files import sync_to_disk
from verl.tenants.base import Shape
from verl.tenants.refused import Refused

CONFIG, TENSORS, OPTIMIZER, RECORD = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "optimizer.safetensors",
    "version.json",
)
KINDS = ("weights", "sampler_weights")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
SCHEME = "tinker://"


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What is saved of an adapter. The tensors are copies."""

    shape: Shape
    config: bytes
    """Peft's adapter_config.json."""
    tensors: dict[str, torch.Tensor]
    """By the names of peft's files."""
    optimizer: dict[str, torch.Tensor] | None
    """Adam's state, where it is saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """A saved adapter."""

    path: str
    """tinker://<training run>/<kind>/<name>"""
    directory: Path
    digest: str
    """SHA-256 of peft's files, in hexadecimal."""
    shape: Shape
    created_s: float
    """Since the epoch."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Raises Refused if the files are no longer those of the digest, or deleted."""
        try:
            data, digest = _read(self.directory)
        except FileNotFoundError as exc:
            raise Refused(f"{self.path} was deleted", status=404) from exc
        if digest != self.digest:
            raise Refused(
                f"{self.path}: its files have the digest {digest[:16]}, not {self.digest[:16]} as when it was named"
            )
        return load(data)

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.directory.iterdir())

    def require_optimizer(self) -> Path:
        """The file of its Adam state. Raises Refused if there is none."""
        path = self.directory / OPTIMIZER
        if not path.is_file():
            raise Refused(f"{self.path} has no optimizer state; load the weights alone, or a path of save_state")
        return path

    def optimizer(self) -> dict[str, torch.Tensor]:
        return load(self.require_optimizer().read_bytes())


def _read(directory: Path) -> tuple[bytes, str]:
    data = (directory / TENSORS).read_bytes()
    return data, hashlib.sha256((directory / CONFIG).read_bytes() + data).hexdigest()


class Checkpoints:
    """The versions below a directory; each owner finds its own alone."""

    def __init__(self, output: Path, base_model: str, *, most: int | None = None) -> None:
        """`most`: versions of an owner."""
        self._output, self._most = output, most
        self._base_model = base_model
        self._counted = Lock()

    def save(
        self,
        owner: str,
        run: str,
        kind: str,
        name: str | None,
        adapter: Snapshot,
        *,
        overwrite: bool = False,
    ) -> Version:
        """Write a version durably, under its digest if it has no name. Its directory appears whole or not at all.

        The same bytes may be saved twice. Raises Refused for a name that is taken by others.
        """
        folder = self._output / owner / _folder(run) / kind
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            for above in list(folder.parents)[:3]:
                sync_to_disk(above)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder))
        try:
            data = save(adapter.tensors, metadata={"format": "pt"})
            digest = hashlib.sha256(adapter.config + data).hexdigest()
            (draft / CONFIG).write_bytes(adapter.config)
            (draft / TENSORS).write_bytes(data)
            if adapter.optimizer is not None:
                save_file(adapter.optimizer, draft / OPTIMIZER)
            record = {
                "digest": digest,
                "shape": adapter.shape.as_json(),
                "base_model": self._base_model,
                "created_s": time.time(),
            }
            (draft / RECORD).write_text(json.dumps(record), "utf-8")
            sync_to_disk(draft)
            target = folder / (name or digest[:32])
            if target.exists():
                if not overwrite and not (adapter.optimizer is None and _record(target).get("digest") == digest):
                    raise Refused(
                        f"{kind}/{target.name} of {run} is there already; take another name, or overwrite=True"
                    )
                shutil.rmtree(target)
                draft.rename(target)
            else:
                with self._counted:
                    self._require_room(owner)
                    draft.rename(target)
            sync_to_disk(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return self.find(owner, f"{SCHEME}{run}/{kind}/{target.name}")

    def _require_room(self, owner: str) -> None:
        if self._most is None:
            return
        number = sum(1 for _ in (self._output / owner).glob(f"*/*/[!.]*/{RECORD}"))
        if number >= self._most:
            raise Refused(f"{number} versions of this key are saved, which is the limit; delete some")

    def find(self, owner: str, path: str) -> Version:
        """Raises Refused for a path that leads to no version of this owner."""
        run, _, rest = path.removeprefix(SCHEME).partition("/")
        kind, _, name = rest.partition("/")
        folder = _folder(run)
        directory = self._output / owner / folder / kind / name
        wrong = (
            not path.startswith(SCHEME) or kind not in KINDS or not (NAME.fullmatch(name) and NAME.fullmatch(folder))
        )
        record = {} if wrong else _record(directory)
        if not record:
            raise Refused(f"there are no weights {path!r} of this key", status=404)
        if record["base_model"] != self._base_model:
            raise Refused(f"{path} is an adapter of {record['base_model']}; this server has {self._base_model}")
        return Version(
            path=path,
            directory=directory,
            digest=record["digest"],
            shape=Shape(**record["shape"]),
            created_s=record["created_s"],
        )

    def versions(self, owner: str, run: str | None = None) -> list[Version]:
        """The versions of an owner, or of a training run of it, the newest first."""
        runs = "*" if run is None else _folder(run)
        if run is not None and not NAME.fullmatch(runs):
            return []
        found = []
        for record in (self._output / owner).glob(f"{runs}/*/*/{RECORD}"):
            folder, kind, name = record.relative_to(self._output / owner).parts[:3]
            if NAME.fullmatch(name):  # others are being written, or deleted
                with suppress(Refused):  # deleted meanwhile, or of another base model
                    found.append(self.find(owner, f"{SCHEME}{_run(folder)}/{kind}/{name}"))
        return sorted(found, key=lambda version: version.created_s, reverse=True)

    def delete(self, owner: str, path: str) -> None:
        """The version is gone at once, whole. Raises Refused for a path that leads to no version of this owner."""
        directory = self.find(owner, path).directory
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=directory.parent))
        directory.rename(draft / "deleted")
        sync_to_disk(directory.parent)
        shutil.rmtree(draft)


def _folder(run: str) -> str:
    return run.replace(":", "_")


def _run(folder: str) -> str:
    return folder.replace("_", ":")


def checked_name(name: str) -> str:
    """Raises Refused for what cannot be the name of a version."""
    if not NAME.fullmatch(name):
        raise Refused(f"{name!r} is no name of weights: letters, digits, '_', '-' and '.' are, 100 at most")
    return name


def _record(directory: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((directory / RECORD).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found
