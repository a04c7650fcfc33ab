"""What the network between two hosts carries: bytes over one plain TCP connection."""

from __future__ import annotations

import socket
import time
from multiprocessing.connection import Connection

from benchmarks.namespaces import Host
from benchmarks.processes import fresh_processes

PORT = 29000
"""Nobody else is on that host."""
CHUNK_NBYTES = 2**20
TIMEOUT_S = 60.0


def gbit_per_s(sender: Host, receiver: Host, nbytes: int) -> float:
    """Of `nbytes` from one host to the other, timed at the receiver from the first bytes to the last.

    Raises ConnectionError if they do not arrive.
    """
    context = fresh_processes()
    ours, theirs = context.Pipe()
    processes = [
        context.Process(target=_receive, args=(theirs, receiver, nbytes), daemon=True),
        context.Process(target=_send, args=(sender, receiver, nbytes), daemon=True),
    ]
    try:
        processes[0].start()
        theirs.close()
        ours.recv()  # it listens
        processes[1].start()
        seconds: float = ours.recv()
    except EOFError as exc:
        raise ConnectionError(f"{nbytes} bytes do not get from {sender.address} to {receiver.address}") from exc
    finally:
        ours.close()
        for process in processes:
            if process.pid is not None:
                process.join(TIMEOUT_S)
    return 8 * nbytes / seconds / 1e9


def _receive(pipe: Connection, here: Host, nbytes: int) -> None:
    here.enter()
    with socket.create_server((here.address, PORT)) as server:
        server.settimeout(TIMEOUT_S)
        pipe.send(None)
        connection, _ = server.accept()
    buffer = memoryview(bytearray(CHUNK_NBYTES))
    with connection:
        connection.settimeout(TIMEOUT_S)
        left = nbytes - connection.recv_into(buffer[: min(nbytes, len(buffer))])
        start_s = time.perf_counter()
        while left:
            received = connection.recv_into(buffer[: min(left, len(buffer))])
            if not received:
                raise ConnectionError(f"{left} bytes have not come")
            left -= received
    pipe.send(time.perf_counter() - start_s)


def _send(here: Host, there: Host, nbytes: int) -> None:
    here.enter()
    buffer = memoryview(bytearray(CHUNK_NBYTES))
    with socket.create_connection((there.address, PORT), TIMEOUT_S) as connection:
        left = nbytes
        while left:
            left -= connection.send(buffer[: min(left, len(buffer))])
