"""The wires of one member, the memory registered with all of them, and the wires abandoned with reads in flight."""

from __future__ import annotations

import time
from collections.abc import Collection

from ..memory.arena import NodeArena
from .wire import LOOK_S, UInt8s, Wire


class Wires:
    """The first wire serves the node's engine thread; the others serve threads that read beside it."""

    def __init__(self) -> None:
        self.open: list[Wire] = []
        self.slots: dict[str, UInt8s] = {}
        """Registered slot files of the arena, by file name."""
        self._abandoned: list[Wire] = []
        """Wires with reads in flight after a failure. Their bytes arrive in memory that nothing else uses."""

    @property
    def first(self) -> Wire | None:
        return self.open[0] if self.open else None

    def register(self, memory: UInt8s) -> None:
        for wire in self.open:
            wire.register(memory)

    def connect(self, owner: int, address: bytes, timeout_s: float) -> None:
        for wire in self.open:
            wire.connect(owner, address, timeout_s)

    def slot(self, arena: NodeArena) -> UInt8s:
        """The memory of the open slot, registered once per slot file. Deregisters files that the arena replaced."""
        view = arena.writable_view()
        self.deregister_slots({path for path in self.slots if (arena.directory / path).exists()})
        if view.path.name not in self.slots:
            memory = view.bytes.numpy()
            self.register(memory)
            self.slots[view.path.name] = memory
        return self.slots[view.path.name]

    def deregister_slots(self, but: Collection[str] = ()) -> None:
        for path in [path for path in self.slots if path not in but]:
            gone = self.slots.pop(path)
            for wire in self.open:
                wire.deregister(gone)

    def abandon(self) -> None:
        """Stop using all wires. The arena replaces the slot, so their late writes reach no slot in use."""
        self._abandoned += self.open
        self.open.clear()
        self.slots.clear()

    def close_abandoned(self) -> None:
        """Close the abandoned wires that are idle."""
        for wire in [wire for wire in self._abandoned if wire.is_idle()]:
            self._abandoned.remove(wire)
            wire.close()

    def close(self, patience_s: float) -> None:
        """Close all wires; those that are not idle after `patience_s`."""
        self.abandon()
        deadline = time.monotonic() + patience_s
        while self._abandoned and time.monotonic() < deadline:
            self.close_abandoned()
            time.sleep(LOOK_S)
        for wire in self._abandoned:
            wire.close()
        self._abandoned.clear()
