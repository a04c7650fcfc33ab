"""The Ray actor around one engine of a reward model."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from ray.util import get_node_ip_address

from verl.checkpoint_engine.engines.leftovers import Leftovers
from verl.checkpoint_engine.support.network import reserve_port
from verl.utils.lifetime import begin_actor
from verl.workers.reward_model.engines import ENGINES, ServerSpec
from verl.workers.rollout.errors import RolloutError

POLL_S = 0.2
CONTROL_S = 120.0
SHOWN_LINES = 5


class RewardModelServer:
    """A Ray actor with one engine in a process of its own, which ends with the actor."""

    def __init__(self, spec: ServerSpec) -> None:
        begin_actor()
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._leftovers: Leftovers | None = None
        self._host = str(get_node_ip_address())  # type: ignore[no-untyped-call]
        self._port = 0

    def start(self, timeout_s: float) -> str:
        """Start the engine, wait until it answers, return its address. Raises RolloutError with its last log."""
        spec = self._spec
        self._leftovers = Leftovers()
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with reserve_port(self._host) as reserved, self._leftovers.finding_shared_memory():
            self._port = reserved.getsockname()[1]
            self._process = self._begun(self._leftovers.environment)
            deadline = time.monotonic() + timeout_s
            while not self.healthy():
                if (code := self._process.poll()) is not None:
                    raise RolloutError(f"{spec.name} ended with exit code {code}: {self._said()}")
                if time.monotonic() > deadline:
                    self.stop()
                    raise RolloutError(f"{spec.name} does not answer after {timeout_s:g} s: {self._said()}")
                time.sleep(POLL_S)
        return f"{self._host}:{self._port}"

    def _begun(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        module = ENGINES[self._spec.config.name].module
        command = [
            sys.executable,
            "-m",
            "verl.checkpoint_engine.support.server_process",
            module,
            *self._spec.arguments(),
        ]
        with self._spec.log.open("wb") as log:
            return subprocess.Popen(
                [*command, "--host", self._host, "--port", str(self._port)],
                env=os.environ | environment | self._spec.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def healthy(self) -> bool:
        try:
            return self._ask("GET", "/health", POLL_S * 5) == http.client.OK
        except OSError:
            return False

    def sleep(self) -> None:
        """Free the device's memory until `wake_up`. Does nothing if the engine cannot sleep."""
        if self._spec.can_sleep:
            self._control("/sleep?level=1")

    def wake_up(self) -> None:
        if self._spec.can_sleep:
            self._control("/wake_up")

    def stop(self) -> None:
        """End the engine's processes. Idempotent."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._leftovers is not None:
            self._leftovers.remove()

    def _control(self, path: str) -> None:
        status = self._ask("POST", path, CONTROL_S)
        if status != http.client.OK:
            raise RolloutError(f"{self._spec.name} answers {status} to {path}")

    def _ask(self, method: str, path: str, timeout_s: float) -> int:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            connection.request(method, path)
            return connection.getresponse().status
        finally:
            connection.close()

    def _said(self) -> str:
        lines = self._spec.log.read_text("utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line] or lines
        return f"{' | '.join(errors[-SHOWN_LINES:])} ({self._spec.log})"
