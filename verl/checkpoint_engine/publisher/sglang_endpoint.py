"""Push into a running SGLang server through its own HTTP routes, with our loader in its ranks.

    python -m sglang.launch_server --model-path MODEL \\
        --custom-weight-loader verl.checkpoint_engine.engines.sglang.loader.load

An order to the loader is sent as the name of an empty tensor; ranks answer in files on their host: see
`engines.sglang.orders`.
"""

from __future__ import annotations

import base64
import io
import logging
import time
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.multiprocessing

from ..engines.sglang.orders import LOADER, Order, Report, TensorShapes, checked, fitted, held_digest, reports_of
from ..errors import ActivationError, ConfigError
from ..parameter_server.http_server import TEST_TIMEOUT_S, HttpServer, Refused
from ..parameter_server.rescue import ANSWERS_IN
from ..support import envs
from ..support.apart import apart
from .committed import require_digest
from .host_claims import claim_path
from .reports import Reports

logger = logging.getLogger(__name__)

IN_PLACE = "in place"
MODES = {"abort": "abort", "keep": "retract", IN_PLACE: "in_place"}
"""SGLang's pause modes. `retract`: requests return to the queue, and are computed again from their tokens. `in_place`:
requests keep their state, for pauses that change no weights."""
FLAG = f"--custom-weight-loader {LOADER}"
FLUSHED_WITHIN_S = 10.0
AGAIN_S = 0.05


class SGLangEndpoint(HttpServer):
    """One SGLang server. Methods that are not async block. All raise TransportError if the server cannot be reached."""

    engine = "SGLang"

    def __init__(
        self, url: str, *, timeout_s: float, check_engine: str, pause_mode: str, reports: Reports, host: int, who: str
    ) -> None:
        """`check_engine`: the versions that ranks check value by value: first, always, off. `host`: the index of its
        node; `reports` of that host. `who`: the writer. Raises ConfigError for a `pause_mode` that SGLang lacks."""
        super().__init__(url, timeout_s=timeout_s)
        if pause_mode not in ("abort", "keep"):
            raise ConfigError(
                f"pause_mode={pause_mode}: SGLang does not pause when its requests have ended: {self.url} needs keep "
                "or abort"
            )
        self._check_engine = check_engine
        self._has_checked = False
        self._ranks = 1
        self._started, self._said = "", ""
        """Its start time, which identifies the process, and the version that it reported then."""
        self._reports, self._host, self._who = reports, host, who
        self._loaded: int | None = None
        """The version that it has loaded since it was paused."""
        self.is_claimed = False
        self._has_begun = False
        """Whether a load has begun since its weights were last known to be whole."""

    def check(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Mapping[str, str]:
        """Check that the server can load versions; `fit` checks that one fits its model. Returns no twins.

        Raises ConfigError that says how to start the server.
        """
        about = self.call("GET", "/server_info", timeout_s=TEST_TIMEOUT_S)
        if not isinstance(about, dict) or not isinstance(about.get("tp_size"), int):
            raise ConfigError(
                f"the SGLang at {self.url} does not report its number of ranks; 0.5.23, which was tested, does"
            )
        if LOADER not in (about.get("custom_weight_loader") or ()):
            raise ConfigError(f"the SGLang at {self.url} cannot take our weights: start it with {FLAG}")
        if several := [name for name in ("dp_size", "pp_size") if about.get(name, 1) != 1]:
            raise ConfigError(f"the SGLang at {self.url} runs with {several[0]}={about[several[0]]}, and needs 1")
        serves_adapters = about.get("enable_lora")
        if serves_adapters or (serves_adapters is None and about.get("lora_paths")):
            raise ConfigError(
                f"the SGLang at {self.url} serves LoRA adapters, which change the names of layers: start it without "
                "--enable-lora and --lora-paths"
            )
        if about.get("enable_eplb"):
            raise ConfigError(f"the SGLang at {self.url} moves experts between ranks: start it without --enable-eplb")
        if guesses := about.get("speculative_algorithm"):
            raise ConfigError(
                f"the SGLang at {self.url} has a second model, which guesses tokens ({guesses}), and what is pushed is "
                "for one: start it without --speculative-algorithm"
            )
        self._ranks, self._has_checked = about["tp_size"], False
        self._started, self._said = str(about.get("startup_time")), self.version()
        return {}

    async def fit(self, tensors: TensorShapes) -> dict[str, str]:
        """Check that `tensors` fit the model of the paused server, without changing it. Returns each head that the
        model lacks with the embedding that it uses instead: their values must be equal.

        Raises ConfigError if the server sleeps, ActivationError listing the tensors that do not fit.
        """
        order = Order(reports="", tensors={name: (dtype, [*shape]) for name, (dtype, shape) in tensors.items()})
        await apart(self._begin)
        try:
            reports = await self._answers(order)
        finally:
            await apart(self._told, "/end_weight_update", {})
        self._has_begun = any(report.torn for report in reports.values())
        if unknown := next((report.unknown for report in reports.values() if report.unknown), ""):
            logger.warning("whether it fits the SGLang at %s is found out when it loads: %s", self.url, unknown)
            return {}
        try:
            return fitted(reports, order.tensors)
        except ConfigError as exc:
            raise ConfigError(f"the SGLang at {self.url} takes no weights: {exc.message}", member=self.url) from exc
        except ActivationError as exc:
            raise ActivationError(exc.message, member=self.url) from exc

    async def claim(self) -> str:
        """Claim the server on its host, since SGLang knows no writers; its identity. Raises ConfigError,
        TransportError."""
        name = await self._reports.claim(self.url, self._who)
        self.is_claimed = True
        if (said := await apart(self.version)) != self._said:  # perhaps it was started anew
            about = await apart(self.call, "GET", "/server_info")
            self._started, self._said = str(about.get("startup_time")), said
        return f"{self._host}:{name}:{self._started}"

    async def release(self) -> None:
        self.is_claimed = False
        await self._reports.release(self.url)

    def pause(self, mode: str) -> None:
        """Stop generating. Idempotent."""
        self._loaded = None
        self.call("POST", "/pause_generation", {"mode": MODES[mode]})

    async def activate(self, arena_path: str, version: int) -> None:
        """Make every rank of the paused server load `version`, and compare the digest that it then holds. Raises
        ActivationError; the weights may be torn then."""
        check = self._check_engine == "always" or (self._check_engine == "first" and not self._has_checked)
        order = Order(reports="", arena_path=arena_path, version=version, check=check)
        await apart(self._begin)
        self._has_begun = True
        try:
            checked(await self._answers(order), order)
            self._has_checked |= check
            # SGLang names the version when its ranks have answered which they hold, in the update that loaded it: not
            # earlier, since they may have failed; nor after it, since another process may answer in its place.
            loaded = held_digest(await self._answers(Order(reports=""), names=str(version)), version)
        finally:
            await apart(self._told, "/end_weight_update", {})
        await apart(require_digest, arena_path, version, loaded)
        await apart(flush_cache, self)
        self._loaded, self._said, self._has_begun = version, str(version), False

    @property
    def is_torn(self) -> bool:
        """Whether a load of this publisher has begun and not succeeded."""
        return self._has_begun

    def go_on(self, version: int, timeout_s: float) -> None:
        """Resume, if no load of `version` has begun. Raises ActivationError otherwise. `timeout_s`: of the
        request."""
        if self._has_begun:
            raise ActivationError(
                f"{self.url} had begun to load version {version}: it stays paused until a load succeeds: push again"
            )
        self.resume(timeout_s)

    def resume(self, timeout_s: float | None = None) -> None:
        """Generate again. Idempotent. Raises ActivationError if a load has torn the weights (the server stays paused),
        or if the server was restarted since it has loaded."""
        if self._has_begun:
            raise ActivationError(
                f"what {self.url} holds is torn by a load that failed: it stays paused until one succeeds"
            )
        self.call("POST", "/continue_generation", {}, timeout_s=timeout_s)
        if self._loaded is not None and (said := self.version()) != str(self._loaded):
            raise ActivationError(f"{self.url} reports version {said!r}, but has loaded '{self._loaded}'")

    def version(self) -> str:
        """The version that the server reports; `default` for the weights that it started with."""
        found: str = self.call("GET", "/model_info")["weight_version"]
        return found

    async def _answers(self, order: Order, names: str | None = None) -> dict[int, Report]:
        """Of all ranks. `names`: what the server then says that it serves."""
        directory = await self._reports.make()
        order = msgspec.structs.replace(order, reports=directory)
        try:
            await apart(self._told, "/update_weights_from_tensor", self._update(order, names))
        finally:
            written = await self._reports.take(directory)
        return reports_of(written, self._ranks)

    def again(self, kept: str | None, version: int) -> Mapping[str, Any]:
        """For the rescue process, which has no torch: bodies of requests, and the directory for answers. Empty without
        a `kept` arena, as for a server on another host."""
        if kept is None:
            return {}
        look = Order(reports=str(Path(kept) / ANSWERS_IN))
        load = msgspec.structs.replace(look, arena_path=kept, version=version, check=self._check_engine != "off")
        return {
            "claim": str(claim_path(envs.shm_dir(), self.url)),
            "answers": look.reports,
            "ranks": self._ranks,
            "look": self._update(look, None),
            "load": self._update(load, None),
            "name": self._update(look, str(version)),
        }

    def _update(self, order: Order, names: str | None) -> dict[str, Any]:
        return {
            "serialized_named_tensors": [_pickled(order.encode())] * self._ranks,
            "load_format": LOADER,
            "flush_cache": False,
            "weight_version": names,
        }

    def _begin(self) -> None:
        try:
            self._told("/begin_weight_update", {})
        except ActivationError as exc:
            if "already open" not in exc.message:
                raise
            self._told("/end_weight_update", {})  # whoever began it was killed in the middle
            self._told("/begin_weight_update", {})

    def _told(self, path: str, body: Mapping[str, Any]) -> None:
        answer = self.call("POST", path, body)
        if not answer["success"]:
            raise ActivationError(f"SGLang refuses the update: {answer['message']}", member=self.url)


def flush_cache(server: HttpServer) -> None:
    """Flush what a paused SGLang has computed before. A batch whose requests have ended may be there for a moment.
    Raises ActivationError."""
    deadline = time.monotonic() + FLUSHED_WITHIN_S
    while True:
        try:
            server.call("POST", "/flush_cache", is_json=False)
        except Refused as exc:
            if time.monotonic() > deadline:
                raise ActivationError(f"SGLang did not flush its cache: {exc.message}", member=server.url) from exc
            time.sleep(AGAIN_S)
        else:
            return


def is_sglang(url: str) -> bool:
    """Whether SGLang answers at `url`. Raises TransportError without an answer, ConfigError for an invalid URL."""
    try:
        about = HttpServer(url, timeout_s=TEST_TIMEOUT_S).call("GET", "/model_info")
    except Refused:
        return False
    return isinstance(about, dict) and "weight_version" in about


def _pickled(text: str) -> str:
    """As SGLang takes tensors over HTTP: this one has no bytes, so nothing of it is shared with another process."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump([(text, torch.empty(0))])
    return base64.b64encode(buffer.getvalue()).decode()
