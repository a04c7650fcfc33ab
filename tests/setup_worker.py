"""What Ray starts in tests for a worker: it has one forked (tests/warm_workers.py), and lasts as long as that does.

In place of Ray's script of this name, by which Ray knows it, and light: there are hundreds of workers.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping

SOCKET = "VERL_WARM_WORKERS"
"""What a worker's environment calls the socket of the server that forks it. Empty: it starts as elsewhere."""


def ask(arguments: list[str]) -> None:
    """`arguments` are those of Ray's script: the runtime environment, and what to start in it."""
    rest = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == "--serialized-runtime-env-context":
            os.environ.update(json.loads(value)["env_vars"])
        elif name != "--language":
            rest.append(argument)
    if not os.environ[SOCKET]:
        os.execv(sys.executable, [sys.executable, *rest])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        send(connection, ["worker", rest, dict(os.environ), os.getcwd()], {number: number for number in range(3)})
        connection.recv(1)


def send(connection: socket.socket, request: object, descriptors: Mapping[int, int]) -> None:
    """A request, and open files by the numbers that they shall have at the receiver."""
    data = json.dumps([request, list(descriptors)]).encode()
    socket.send_fds(connection, [len(data).to_bytes(8, "big")], list(descriptors.values()))
    connection.sendall(data)


if __name__ == "__main__":
    ask(sys.argv[1:])
