"""One long run of bytes through a wire, in parts."""

from __future__ import annotations

import time
from typing import Any

from verl.checkpoint_engine.errors import TransportTimeout
from verl.checkpoint_engine.links.wire import UInt8s, Wire

PART_NBYTES = 2**26
IN_FLIGHT = 4
LOOK_S = 0.05


def read_into(target: UInt8s, wire: Wire, source: int, *, timeout_s: float, member: int = 0) -> None:
    """Fill `target` with what begins at `source` in the memory of one of the wire's members.

    Raises TransportError; TransportTimeout after so long without a part that has arrived.
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
            if time.monotonic() > arrived_s + timeout_s:
                raise TransportTimeout(f"nothing has arrived for {timeout_s:g} s")
            wire.wait(LOOK_S)
        else:
            arrived_s = time.monotonic()
        flying = waiting
    wire.deregister(target)
