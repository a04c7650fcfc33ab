"""Read lent memory of other processes over wires, in parts, and check it against digests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from verl.checkpoint_engine.backends.tcp import TcpWire
from verl.checkpoint_engine.errors import IntegrityError, TransportTimeout
from verl.checkpoint_engine.links.wire import UInt8s, Wire
from verl.checkpoint_engine.memory.digest import digest_pieces, named
from verl.checkpoint_engine.memory.threads import memory_threads
from verl.checkpoint_engine.plan.sync_plan import SyncPlan

CONNECTIONS = 4
READ_WITHIN_S = 120.0
PART_NBYTES = 2**24
IN_FLIGHT = 4
LOOK_S = 0.05


@contextmanager
def connected(host: str, members: Mapping[int, bytes]) -> Iterator[TcpWire]:
    """A wire of this `host` (address), connected to the wires of `members` (addresses). Raises TransportError."""
    wire = TcpWire(host, CONNECTIONS, listens=False)
    try:
        for number, address in members.items():
            wire.connect(number, address, READ_WITHIN_S)
        yield wire
    finally:
        wire.close()


def read_into(target: UInt8s, wire: Wire, source: int, *, member: int = 0) -> None:
    """Fill `target` from address `source` in the memory of a member of the wire.

    Raises TransportError; TransportTimeout if no part arrives within `READ_WITHIN_S`.
    """
    wire.register(target)
    left, flying = list(range(0, target.nbytes, PART_NBYTES))[::-1], list[Any]()
    begin, arrived_s = target.ctypes.data, time.monotonic()
    while left or flying:
        while left and len(flying) < IN_FLIGHT:
            offset = left.pop()
            nbytes = min(PART_NBYTES, target.nbytes - offset)
            flying.append(wire.read(member, source + offset, begin + offset, nbytes))
        waiting = [transfer for transfer in flying if not wire.is_done(transfer)]
        if len(waiting) == len(flying):
            if time.monotonic() > arrived_s + READ_WITHIN_S:
                raise TransportTimeout(f"nothing has arrived for {READ_WITHIN_S:g} s")
            wire.wait(LOOK_S)
        else:
            arrived_s = time.monotonic()
        flying = waiting
    wire.deregister(target)


def require_pieces(memory: UInt8s, base: int, plan: SyncPlan, pieces: np.ndarray, digests: bytes, rank: int) -> None:
    """Raises IntegrityError unless these `pieces` are in `memory`, which begins at `base` of the plan's region, what
    `rank` left, by the digests of all pieces."""
    there = plan.extents.take(pieces)
    found = digest_pieces(memory, replace(there, offset=there.offset - base), threads=memory_threads())
    wrong = pieces[found != np.frombuffer(digests, np.uint64)[pieces]].tolist()
    if wrong:
        raise IntegrityError(f"{len(wrong)} pieces of rank {rank} are not what it left: {named(plan, wrong)}")
