"""One slot of an arena, mapped into a process."""

from __future__ import annotations

import contextlib
import mmap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..plan.layout import Layout
from .pinning import Pinned, Spans

if TYPE_CHECKING:
    import torch

    from ..plan.types import TensorSpec


class SlotView:
    """One slot mapped into this process. The mapping, and every tensor made from it, lives until `close`."""

    def __init__(self, path: Path, layout: Layout, *, writable: bool) -> None:
        import torch

        self.path = path
        self.layout = layout
        self._writable = writable
        self._pinned: Pinned | None = None
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        with path.open("r+b" if writable else "rb") as file:
            self._memory = mmap.mmap(
                file.fileno(), max(layout.nbytes, 1), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=access
            )
        with warnings.catch_warnings():  # torch warns that it cannot mark a read-only buffer; nobody writes to these
            warnings.simplefilter("ignore", UserWarning)
            # Through numpy, whose array locks the mapping: torch.frombuffer would let `close` unmap a tensor in use.
            self.bytes: torch.Tensor = torch.from_numpy(np.frombuffer(self._memory, np.uint8))

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """The tensor `spec` in this slot, borrowed. Writing to it in a read-only view kills the process."""
        import torch

        offset = self.layout.offsets[self.layout.index[spec.name]]
        return self.bytes[offset : offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in self.layout.specs:
            yield spec.name, self.tensor(spec)

    def pin(self, spans: Spans | None = None) -> None:
        """Pin the parts `spans`, or the whole slot, until `close`. See `Pinned`."""
        self._pinned = Pinned(self.bytes, spans, read_only=not self._writable)

    def close(self) -> None:
        """Unmap the slot. Tensors that still borrow the memory keep it mapped until they are freed."""
        if self._pinned is not None:
            self._pinned.close()
        del self.bytes
        with contextlib.suppress(BufferError):
            self._memory.close()
