"""The committed version of an arena: engines of the same host, and other readers, find and map it here."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..errors import ActivationError, IntegrityError
from ..plan.encoded import unpacked
from ..plan.layout import Layout
from ..support.files import read_regular
from .digest import Manifest
from .slot import SlotView

if TYPE_CHECKING:
    import torch

MOST_CURRENT_NBYTES = 2**12
_FILE = re.compile(r"slot-\d{1,9}\.\d{1,18}(\.manifest)?", re.ASCII)


class Committed(msgspec.Struct, frozen=True):
    """The content of the file `current`."""

    version: int
    slot: str
    manifest: str


def committed_version(arena_path: str | Path) -> int | None:
    """The committed version of this arena; None if there is none. Raises IntegrityError for a damaged arena."""
    committed = _read_current(Path(arena_path))
    return committed.version if committed else None


def _read_current(directory: Path) -> Committed | None:
    try:
        data = read_regular(directory / "current", MOST_CURRENT_NBYTES)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise IntegrityError(f"{directory / 'current'} cannot be read: {exc.strerror}") from exc
    committed = unpacked(data, Committed, f"what an arena writes into {directory / 'current'}", IntegrityError)
    if not (_FILE.fullmatch(committed.slot) and _FILE.fullmatch(committed.manifest)):
        raise IntegrityError(f"{directory / 'current'} names {committed.slot[:40]!r}, which is no slot of an arena")
    return committed


def _require_committed(directory: Path, version: int) -> Committed:
    committed = _read_current(directory)
    if committed is None or committed.version != version:
        state = "holds nothing" if committed is None else f"holds version {committed.version}"
        raise IntegrityError(f"{directory} {state}; version {version} was requested", version=version, phase="activate")
    return committed


def committed_digest(arena_path: str | Path, version: int) -> str | None:
    """`Manifest.digest` of the committed `version`; None if the arena is not on this host.

    Raises IntegrityError if another version is committed, or its manifest is damaged.
    """
    directory = Path(arena_path)
    if not directory.is_dir():
        return None
    committed = _require_committed(directory, version)
    return Manifest.decode((directory / committed.manifest).read_bytes()).digest


class PinnedSlots:
    """Slots that an engine on an accelerator keeps mapped and pinned between activations.

    Pinning a slot takes longer than loading from it, so it stays pinned until the arena replaces its file. Used from
    one thread.
    """

    def __init__(self) -> None:
        self._views: dict[tuple[Path, int], SlotView] = {}

    def view(self, path: Path, inode: int, layout: Layout) -> SlotView:
        """The slot at `path`, which the caller has open with this `inode`. Closes slots whose file is gone."""
        for key in [key for key in self._views if not _is_file(*key)]:
            self._views.pop(key).close()
        view = self._views.get((path, inode))
        if view is None:
            view = self._views[path, inode] = SlotView(path, layout, writable=False)
            view.pin()
        view.layout = layout
        return view

    def close(self) -> None:
        """Unmap all slots. Idempotent."""
        while self._views:
            self._views.popitem()[1].close()


def _is_file(path: Path, inode: int) -> bool:
    try:
        return path.stat().st_ino == inode
    except OSError:
        return False


@contextlib.contextmanager
def open_committed(
    arena_path: str | Path, version: int, kept: PinnedSlots | None = None
) -> Iterator[tuple[Manifest, SlotView]]:
    """Map the committed `version` read-only, for engines on the same host. Tensors are borrowed until the block ends.

    `kept`: slots that stay mapped; this one is added to them.

    Raises IntegrityError if the arena is gone or its committed version is another one.
    """
    directory = Path(arena_path)
    with contextlib.ExitStack() as stack:
        try:
            committed = _require_committed(directory, version)
            held = stack.enter_context((directory / committed.slot).open("rb"))
            fcntl.flock(held, fcntl.LOCK_SH)  # a slot that is being read is replaced, not overwritten
            _require_committed(directory, version)  # it may have been given up between the look and the lock
            manifest = Manifest.decode((directory / committed.manifest).read_bytes())
            path, layout = directory / committed.slot, manifest.plan.layout
            if kept is not None:
                view = kept.view(path, os.fstat(held.fileno()).st_ino, layout)
            else:
                view = SlotView(path, layout, writable=False)
                stack.callback(view.close)
        except FileNotFoundError as exc:
            raise IntegrityError(
                f"version {version} was removed while it was being opened: {exc}", version=version, phase="activate"
            ) from exc
        yield manifest, view


@contextlib.contextmanager
def open_to_activate(
    arena_path: str | Path, version: int, kept: PinnedSlots | None = None
) -> Iterator[tuple[Manifest, SlotView]]:
    """`open_committed` for an engine that activates `version`. Raises ActivationError instead of IntegrityError."""
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(open_committed(arena_path, version, kept))
        except IntegrityError as exc:
            raise ActivationError(exc.message, version=version, phase="activate") from exc
        yield opened


def read_committed(arena_path: str | Path, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (Hugging Face name, tensor) of the committed `version`. A tensor is borrowed until the iterator ends."""
    with open_committed(arena_path, version) as (_, view):
        yield from view.tensors()
