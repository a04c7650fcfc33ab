"""Links between network namespaces that take time and lose packets, for kernels without netem.

A process carries the frames of a host from a device of it (TAP) to the switch and back, each after a while, and forgets
some. Python does that with some ten thousand packets a second: 100 Mbit/s.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME_NBYTES = 65536
WAITING_NBYTES = 4 * 2**20
"""In one direction of a link; more is dropped, as a switch with a full buffer does."""


@contextlib.contextmanager
def carrying(links: Sequence[tuple[str, str, str, str]], *, delay_s: float, loss: float) -> Iterator[None]:
    """Each link is namespace and device of its one end, and of the other; the devices are made, and go with the block.

    `delay_s` is that of one direction, `loss` the share of packets.
    """
    words = [f"{delay_s}", f"{loss}", *(word for link in links for word in link)]
    command = [sys.executable, "-m", __name__, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise OSError("links with a delay cannot be made: is there a /dev/net/tun?")
            yield
        finally:
            process.kill()


def _tap(namespace: str, name: str) -> int:
    """This process stays in that namespace."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, 0):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    finally:
        os.close(handle)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def _carry(pairs: Sequence[tuple[int, int]], delay_s: float, loss: float) -> None:
    other = {end: far for pair in pairs for end, far in (pair, pair[::-1])}
    waiting = dict.fromkeys(other, 0)
    chance, order = random.Random(0), itertools.count()
    under_way: list[tuple[float, int, int, bytes]] = []
    poll = select.poll()
    for end in (*other, sys.stdin.fileno()):
        poll.register(end, select.POLLIN)
    while True:
        rest_ms = max(0.0, under_way[0][0] - time.monotonic()) * 1000 if under_way else None
        for end, _ in poll.poll(rest_ms):
            if end not in other:  # whoever started this is gone
                return
            with contextlib.suppress(BlockingIOError):
                while frame := os.read(end, FRAME_NBYTES):
                    far = other[end]
                    if chance.random() >= loss and waiting[far] < WAITING_NBYTES:
                        waiting[far] += len(frame)
                        heapq.heappush(under_way, (time.monotonic() + delay_s, next(order), far, frame))
        now_s = time.monotonic()
        while under_way and under_way[0][0] <= now_s:
            _, _, far, frame = heapq.heappop(under_way)
            waiting[far] -= len(frame)
            with contextlib.suppress(OSError):  # its queue is full, or the device is not up yet
                os.write(far, frame)


def main(words: Sequence[str]) -> None:
    delay_s, loss, *ends = words
    quadruples = [ends[at : at + 4] for at in range(0, len(ends), 4)]
    pairs = [(_tap(near, name), _tap(far, port)) for near, name, far, port in quadruples]
    print("ready", flush=True)
    _carry(pairs, float(delay_s), float(loss))


if __name__ == "__main__":
    main(sys.argv[1:])
