"""What Ray starts for a worker: it has one forked, and lasts as long as that does.

Stands in for Ray's script that prepares a runtime environment. Imports the standard library alone: there are many
workers.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from collections.abc import Mapping

SOCKET = "VERL_WARM_WORKERS"
"""The environment variable with the path of the socket of the process that forks workers. Empty: start without."""


def ask(arguments: list[str]) -> None:
    """`arguments` are those of Ray's script: the runtime environment, and the command to start in it."""
    command, environment = [], dict[str, str]()
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == "--serialized-runtime-env-context":
            context = json.loads(value)
            prepared = context["command_prefix"] or context["override_worker_entrypoint"]
            if prepared or context["py_executable"] != sys.executable:
                start_as_ray_does(arguments)
            environment = context["env_vars"]
        elif name != "--language":
            command.append(argument)
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(environment[SOCKET])
            os.environ.update({name: os.path.expandvars(value) for name, value in environment.items()})
            request = ["worker", command, dict(os.environ), os.getcwd(), limits()]
            send(connection, request, {number: number for number in range(3)})
            is_forked = connection.recv(1)
        except (KeyError, OSError):  # it is not wanted, or has ended
            is_forked = b""
        if not is_forked:
            start_as_ray_does(arguments)
        connection.recv(1)  # until the fork ends


def limits() -> list[list[int]]:
    """(number, soft, hard) of each of `resource`'s, which Ray raises when it starts; at the end the score for the
    kernel's out-of-memory killer, which Ray gives its workers."""
    numbers = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
    with open("/proc/self/oom_score_adj", encoding="utf-8") as score:
        return [*([number, *resource.getrlimit(number)] for number in numbers), [int(score.read())]]


def start_as_ray_does(arguments: list[str]) -> None:
    """Become Ray's own script, which lies beside the one of the worker. Does not return."""
    (worker,) = (argument for argument in arguments if argument.endswith("default_worker.py"))
    script = os.path.join(os.path.dirname(worker), "setup_worker.py")
    os.execv(sys.executable, [sys.executable, script, *arguments])


def send(connection: socket.socket, request: object, descriptors: Mapping[int, int]) -> None:
    """Send a request, and open files by the numbers that they get at the receiver."""
    data = json.dumps([request, list(descriptors)]).encode()
    socket.send_fds(connection, [len(data).to_bytes(8, "big")], list(descriptors.values()))
    connection.sendall(data)


if __name__ == "__main__":
    ask(sys.argv[1:])
