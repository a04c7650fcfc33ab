r"""A running `vllm serve` with our plugin, as the command line sees it: its HTTP routes for weight updates. No torch.

vLLM has these routes only where `VLLM_SERVER_DEV_MODE=1`, and our engine only where it was asked for:

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL \
        --gpu-memory-utilization 0.5 --weight-transfer-config '{"backend": "verl_arena"}'
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec

from ..errors import ActivationError, CheckpointEngineError, ConfigError, TransportError
from ..support import envs
from ..support.package import PACKAGE
from .checkpoint_directory import State
from .http_server import TEST_TIMEOUT_S, HttpServer, Refused
from .rescue import Rescue
from .rescuing import ended
from .writers import LEASE_S, Answer, Writer, answers_to, order, require_loaded, require_own, require_whole

ENGINE_NAME = f"{PACKAGE.partition('.')[0]}_arena"
"""What to write in vLLM's `weight_transfer_config` to have weights loaded from a node arena or a ParameterServer.

`verl_arena`, or `verl_sync_arena`: where both distributions are installed, an engine speaks with its own."""
ANSWERS = f"{ENGINE_NAME}_answers"
"""The method of vLLM's workers, which our plugin gives them, that answers to an `Order`."""
ENGINE = "vLLM"
AGAIN_S = 0.2
PAUSE_MODES = ("abort", "wait", "keep")
FLAG = f'--weight-transfer-config \'{{"backend": "{ENGINE_NAME}"}}\''


class Endpoint(HttpServer):
    """One server. Every method blocks; raises TransportError, or TransportTimeout, if it cannot be reached."""

    _loaded: tuple[str, int | None] | None = None
    """The load and the version that its workers have said that they compute with, when `load` was last called."""

    def check(self, parallel_size: int | None, tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None) -> None:
        """Make sure that an update can work, before anything happens: the engine goes on serving.

        `parallel_size` is the number of its workers that will be fed, None if all of them take the same; `tensors` are
        names, dtypes and shapes to be held against its model, or None. Raises ConfigError that says what to change,
        ActivationError that lists what does not fit.
        """
        everybody, workers = self._world_sizes()
        if workers != everybody:
            raise ConfigError(
                f"the server at {self.url} runs {everybody // workers} data-parallel engines: start one server for "
                "each, and list all of them as endpoints"
            )
        if parallel_size is not None and workers != parallel_size:
            raise ConfigError(
                f"the engine at {self.url} has {workers} workers: set --inference-parallel-size {workers} "
                f"(it is {parallel_size})"
            )
        try:
            self.call("POST", "/init_weight_transfer_engine", {"init_info": {"tensors": tensors}})
        except Refused as exc:
            if "init_info" in exc.message or "not configured" in exc.message:
                raise ConfigError(f"the engine at {self.url} cannot take our weights: start vLLM with {FLAG}") from exc
            raise

    def _world_sizes(self) -> tuple[int, int]:
        """Workers of all engines behind this server, and of one of them."""
        path = "/get_world_size"
        try:
            everybody = self.call("GET", path, timeout_s=TEST_TIMEOUT_S)["world_size"]
            return everybody, self.call("GET", f"{path}?include_dp=false", timeout_s=TEST_TIMEOUT_S)["world_size"]
        except Refused as exc:
            if exc.status == 404:
                raise ConfigError(
                    f"{self.url} has no routes for weight updates: start vLLM with VLLM_SERVER_DEV_MODE=1 in its "
                    f"environment, and with {FLAG}"
                ) from exc
            raise
        except (KeyError, TypeError) as exc:
            raise ConfigError(f"the server at {self.url} is not vLLM: correct --endpoint") from exc
        except TransportError as exc:
            raise TransportError(
                f"no vLLM answers at {self.url} ({exc.message}): start it, or correct --endpoint"
            ) from exc

    def claim(self, writer: Writer) -> str:
        """Make the server `writer`'s, or renew that; what tells this server from others, and from one that is started
        in its place. It goes on serving. Waits for one that sees after what a writer that has ended left.

        Raises ConfigError if it is somebody else's, or has what updates cannot be loaded into.
        """
        deadline_s = time.monotonic() + LEASE_S
        answers = self._ask("claim", writer)
        while any(answer.claimed_by and answer.claimed_by.rescues for answer in answers):
            if time.monotonic() > deadline_s:
                break
            time.sleep(AGAIN_S)
            answers = self._ask("claim", writer)
        require_own(answers, writer, self.url)
        return answers[0].server

    def copies(self) -> dict[str, str]:
        """Of the tensors that were last checked: those that its model has no place for, and which it has instead."""
        return {name: twin for answer in self._ask("look") for name, twin in answer.copies.items()}

    def release(self, writer: Writer) -> None:
        """Others may write it. Idempotent."""
        self._ask("release", writer)

    def _ask(self, act: Literal["look", "claim", "release"], writer: Writer | None = None) -> Sequence[Answer]:
        """Every worker. None of them ever refuses: the answers of others would stay unread in vLLM's executor."""
        asked = order(act, writer)
        body = {"method": ANSWERS, "args": [msgspec.json.encode(asked).decode()]}
        try:
            said = self.call("POST", "/collective_rpc", body)
        except Refused as exc:
            raise ConfigError(
                f"the workers at {self.url} do not report their version ({exc.message}): start vLLM with {FLAG}. If it "
                "was, a refusal of another call has left answers unread: restart the server"
            ) from exc
        return answers_to(asked, said.get("results") if isinstance(said, dict) else said, self.url)

    def update(
        self,
        socket_paths: Mapping[str, str],
        version: str,
        *,
        pause_mode: str = "wait",
        files: Mapping[str, State] | None = None,
        again: Sequence[str] = (),
    ) -> None:
        """Make every worker load its weights from its socket, and serve them as `version`.

        If this process is killed before workers load, the server continues with its old weights. If it is killed, or
        fails, while they do, a process that outlives it has them read `files`, which hold the same weights, or runs the
        command `again`, an update of its own. Without either, or if the files were written to meanwhile, the server
        then serves nothing: it holds a mixture of weights and stays paused until an update succeeds. Raises ConfigError
        if the server belongs to another publisher, ActivationError if the engine refuses.
        """
        writer = Writer.here("update")
        rescue = Rescue(envs.shm_dir(), ANSWERS, writer)
        self.claim(writer)
        try:
            rescue.pausing(self.url, ENGINE)
            self.pause(pause_mode)
            info, load = {"socket_paths": dict(socket_paths), "timeout_s": self.timeout_s}, secrets.token_hex(8)
            rescue.loading(self.url, ENGINE, files=files, command=again, label=version, load=load)
            self.load(info, version, writer, load)
            self.resume()
            rescue.serving(self.url, ENGINE)
        finally:
            with suppress(CheckpointEngineError):
                self.release(writer)
            rescue.close()

    def pause(self, mode: str) -> None:
        """Stop generating; `mode` is one of `PAUSE_MODES`. Idempotent."""
        self.call("POST", f"/pause?mode={mode}")

    def load(self, update_info: Mapping[str, Any], version: str, writer: Writer, load: str = "") -> str:
        """Make every worker load the weights of `update_info` as `version`, while the engine is paused. As `update`.
        `load`: its name among the workers, if the caller has to know that.

        Returns the digest of the loaded weights that the workers report, if they came from an arena. The server reports
        `version` once all workers have loaded it.
        """
        load, self._loaded = load or secrets.token_hex(8), None
        self._start(writer)
        try:
            info = dict(update_info) | {"writer": writer.id, "load": load}
            self.call("POST", "/update_weights", {"update_info": info})
            require_loaded(self._ask("look"), load, update_info.get("version"), self.url)
        except (ActivationError, ConfigError, TransportError):
            with suppress(CheckpointEngineError):  # of its workers, one has raised; the others wait for this
                self._end(self._ask("look"))
            raise
        self.call("POST", "/finish_weight_update", {"weight_version": version})
        answers = self._ask("look")
        require_loaded(answers, load, update_info.get("version"), self.url)
        if (said := self.version()) != version:
            raise ActivationError(f"{self.url} reports version {said!r}, but has loaded {version!r}")
        self.call("POST", "/reset_prefix_cache?reset_running_requests=true")
        self._loaded = load, update_info.get("version")
        return answers[0].digest

    def resume(self) -> None:
        """Generate again. Idempotent. Raises ActivationError if its weights are torn, and it stays paused; or if its
        workers do not compute with what was loaded, since it was started anew."""
        require_whole(self._ask("look"), self.url)
        self.call("POST", "/resume")
        if self._loaded is not None:
            require_loaded(self._ask("look"), *self._loaded, self.url)

    def go_on(self, version: int, writer: Writer) -> None:
        """Generate again with what all workers hold, whole: `version`, if its load had come that far, or what was there
        before, each under its name. Raises ActivationError if it is torn, or another's than `writer`'s by now."""
        answers = self._ask("claim", writer)
        require_own(answers, writer, self.url)
        workers: list[dict[str, Any]] = [msgspec.to_builtins(answer) for answer in answers]
        what = {"load": "", "version": version, "label": str(version)}
        if not ended(what, workers, lambda path, body=None: self.call("POST", path, body)):
            require_whole(self._ask("look"), self.url)
            raise ActivationError(f"the workers of {self.url} hold different weights: it stays paused")
        self.call("POST", "/resume")

    def _start(self, writer: Writer) -> None:
        answers = self._ask("claim", writer)
        require_own(answers, writer, self.url)
        self._end(answers)  # whoever began it was killed in the middle
        self.call("POST", "/start_weight_update", {})

    def _end(self, answers: Sequence[Answer]) -> None:
        """An update that is active. Of several workers one may have given up; the others wait for this."""
        if any(answer.active for answer in answers):
            with suppress(*([] if all(answer.active for answer in answers) else [Refused])):
                self.call("POST", "/finish_weight_update")

    def version(self) -> str:
        """What the engine says that it serves; `default` for the weights that it started with."""
        found: str = self.call("GET", "/weight_info")["weight_version"]
        return found
