"""Publishers that are killed: forks of a process that has torch loaded.

`python -m tests.checkpoint_engine.publisher.victims` reads what each is to push from its stdin, a line of JSON, and
writes its process id, and how it ended. A victim that is interrupted, or that nobody has killed by the end of its
pushes, kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any, Self

import torch

from verl.checkpoint_engine import WeightPublisher
from verl.checkpoint_engine.errors import CheckpointEngineError


class Victim:
    def __init__(self, process: subprocess.Popen[str], told: str) -> None:
        self._process, self._told = process, told
        self._known, self._pid = Event(), 0

    def go(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(self._told, file=self._process.stdin, flush=True)
        self._pid = int(self._process.stdout.readline())
        self._known.set()

    def kill(self, by: signal.Signals = signal.SIGKILL) -> None:
        """From any thread, after `go` has begun."""
        self._known.wait()
        with suppress(ProcessLookupError):
            os.kill(self._pid, by)

    def wait(self) -> None:
        assert self._process.stdout is not None
        assert -int(self._process.stdout.readline()) in (signal.SIGKILL, signal.SIGTERM)


class Victims:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def new(self, shm: Path, url: str, pushes: Mapping[int, dict[str, torch.Tensor]]) -> Victim:
        """It pushes them by their versions, in order; what fails is left out."""
        with tempfile.NamedTemporaryFile(dir=shm, suffix=".pt", delete=False) as file:
            torch.save(dict(pushes), file)
        return Victim(self._process, json.dumps({"shm": str(shm), "url": url, "file": file.name}))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def be_one(told: Mapping[str, Any]) -> None:
    os.environ["VERL_SHM_DIR"] = told["shm"]
    pushes: dict[int, dict[str, torch.Tensor]] = torch.load(told["file"])
    tensors: dict[str, torch.Tensor] = {}
    tensors.update(next(iter(pushes.values())))
    publisher = WeightPublisher(tensors, [told["url"]])
    for version, weights in pushes.items():
        tensors.update(weights)
        with suppress(CheckpointEngineError):
            publisher.push(version)


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                be_one(json.loads(line))
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
