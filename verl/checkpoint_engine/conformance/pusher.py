"""A pusher in a process of its own, which a test can stop and kill. No torch, unless its route needs it.

Its argument is JSON: the arguments of `Pusher`. It prints a line with its error.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import CheckpointEngineError
from ..support.package import PACKAGE
from .routes import route_of

TORCH = "/dev/shm/torch_"
"""Begins the names of torch's shared memory."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a pusher's process."""

    how: Literal["succeeded", "failed", "killed"]
    error: str = ""


class Pusher:
    """One push by a process of its own. Used from one thread, but for `stop` and `kill`."""

    def __init__(
        self,
        route: str,
        url: str,
        directory: Path,
        version: int,
        *,
        timeout_s: float,
        pause_mode: str,
        sglang: bool = False,
        most_file_nbytes: int | None = None,
    ) -> None:
        """`timeout_s`: of each call. `sglang`: as in `route_of`. `most_file_nbytes`: limit of the files and the shared
        memory that it writes."""
        self.route = route
        given = {"route": route, "url": url, "directory": str(directory), "version": version}
        given |= {"timeout_s": timeout_s, "pause_mode": pause_mode, "sglang": sglang}
        command = [f"{PACKAGE}.conformance.pusher", json.dumps(given)]
        if route == "update":  # the command itself, which leaves a rescue behind
            command = [f"{PACKAGE}.update", "--checkpoint-path", str(directory), "--endpoint", url]
            command += ["--weight-version", str(version), "--pause-mode", pause_mode, "--timeout-s", str(timeout_s)]
        # A file, and no pipe: processes of libraries that outlive the pusher would keep that open.
        self._printed = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - see `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=self._printed, stderr=subprocess.STDOUT
        )
        self.pid = self._process.pid
        if most_file_nbytes is not None:
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (most_file_nbytes, most_file_nbytes))

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """Idempotent."""
        with suppress(ProcessLookupError):
            self._process.kill()

    def result(self, timeout_s: float) -> Ended | None:
        """None if it has not ended in time."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        if code == -signal.SIGKILL:
            return Ended(how="killed")
        if code == 0:
            return Ended(how="succeeded")
        self._printed.seek(0)
        printed = self._printed.read()
        said = [line for line in printed.splitlines() if line.startswith("error: ")]
        return Ended(how="failed", error=said[-1].removeprefix("error: ") if said else printed[-500:])

    def close(self) -> None:
        """Kill it if it runs."""
        self.kill()
        self._process.wait()
        self._printed.close()

    def files(self) -> list[Path]:
        """The memory that it shares with the engine, under no name or one of torch's."""
        found = []
        with suppress(OSError):
            mapped = Path(f"/proc/{self.pid}/maps").read_text("utf-8").split()
            found += [Path(word) for word in dict.fromkeys(mapped) if word.startswith(TORCH)]
        for one in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(one).startswith("/memfd:"):
                    found.append(one)
        return found


def main(arguments: list[str]) -> int:
    """Push, and print `error: ...` if it fails. Exit code 0 or 1."""
    given = json.loads(arguments[0])
    try:
        directory, version = Path(given.pop("directory")), given.pop("version")
        route = route_of(given.pop("route"), given.pop("url"), **given)
        try:
            route.push(directory, version)
        finally:
            route.close()
    except (CheckpointEngineError, OSError) as exc:
        sys.stdout.write(f"error: {' '.join(str(exc).split())}\n")
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # the push has ended, whatever the threads of libraries do at the end of a process
