r"""The HTTP routes for weight updates of a running `vllm serve` with our plugin. No torch.

vLLM has these routes only with `VLLM_SERVER_DEV_MODE=1`, and our engine only with this configuration:

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
"""The backend in vLLM's `weight_transfer_config` that loads weights from a node arena or a ParameterServer.

It is `verl_arena` or `verl_sync_arena`, by distribution, so that both distributions can be installed together."""
ANSWERS = f"{ENGINE_NAME}_answers"
"""The method that our plugin adds to vLLM's workers: it answers an `Order`."""
NO_ENGINE = {"failed": "this worker has no engine of ours"}
"""A worker's answer if the server has our plugin, and was started without `FLAG`."""
ENGINE = "vLLM"
AGAIN_S = 0.2
PAUSE_MODES = ("abort", "wait", "keep")
FLAG = f'--weight-transfer-config \'{{"backend": "{ENGINE_NAME}"}}\''


class Endpoint(HttpServer):
    """One vLLM server. Every method blocks, and raises TransportError if the server cannot be reached."""

    _loaded: tuple[str, int | None] | None = None
    """The load and the version that its workers reported after the last `load`."""

    def check(self, parallel_size: int | None, tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None) -> None:
        """Check before an update that it can work; the engine keeps serving.

        `parallel_size`: the number of workers with a source each, None if all load from one. `tensors`: names, dtypes
        and shapes to compare with the model, or None. Raises ConfigError with the remedy, ActivationError listing the
        tensors that do not fit, or if the workers return answers of earlier calls.
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
        self._ask("look")  # before a question whose answer could be that of an earlier call
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
        """Claim the server for `writer`, or renew the claim. Returns the server's identity, which a restart changes.
        The server keeps serving. Waits for a rescue that has the claim.

        Raises ConfigError if another writer has the claim, or the engine cannot load updates.
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
        """Of the tensors last checked: each without a place in the model, with the twin that the model uses instead."""
        return {name: twin for answer in self._ask("look") for name, twin in answer.copies.items()}

    def release(self, writer: Writer) -> None:
        """Release the claim of `writer`. Idempotent."""
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
        results = said.get("results") if isinstance(said, dict) else said
        if isinstance(results, list) and NO_ENGINE in results:
            raise ConfigError(f"the engine at {self.url} cannot take our weights: start vLLM with {FLAG}")
        return answers_to(asked, results, self.url)

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
        fails, during the load, a rescue process makes the workers read `files`, which hold the same weights, or runs
        the command `again`, another update. Without either, or if the files have changed, the server stays paused with
        mixed weights until an update succeeds. Raises ConfigError if the server belongs to another publisher,
        ActivationError if the engine refuses.
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
        """Make every worker load the weights of `update_info` as `version`, while the engine is paused. `load`: an
        identity of this load for the workers; by default a random one. Raises as `update`.

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
                answers = self._ask("look")
                has_loaded = all(answer.load == load and not answer.torn for answer in answers)
                self._end(answers, version if has_loaded else None)  # loaded: only the answer was lost
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
        """Generate again. Idempotent. Raises ActivationError if a load has torn the weights (the server stays paused),
        or if the workers do not hold the last load, because the server was restarted."""
        require_whole(self._ask("look"), self.url)
        self.call("POST", "/resume")
        if self._loaded is not None:
            require_loaded(self._ask("look"), *self._loaded, self.url)

    def go_on(self, version: int, writer: Writer) -> None:
        """Generate again with the version that all workers hold: `version` if its load was complete, else the previous
        one. Raises ActivationError if the weights are torn, ConfigError if another writer has the claim."""
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

    def _end(self, answers: Sequence[Answer], version: str | None = None) -> None:
        """End an update that is active, whose weights are `version`, or unknown. Of several workers one may have given
        up; the others wait for this."""
        if any(answer.active for answer in answers):
            with suppress(*([] if all(answer.active for answer in answers) else [Refused])):
                self.call("POST", "/finish_weight_update", {"weight_version": version} if version else None)

    def version(self) -> str:
        """The version that the engine reports; `default` for the weights that it started with."""
        found: str = self.call("GET", "/weight_info")["weight_version"]
        return found
