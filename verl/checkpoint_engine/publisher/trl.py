"""TRL's trainers push through a `WeightPublisher`: `AsyncGRPOTrainer(weight_transfer=TRLWeightTransfer([...]))`.

TRL gathers the weights, tensor by tensor, in its main process, which alone uses this class. The protocol is that of TRL
1.16, `trl.experimental.async_grpo`; this module imports nothing of TRL.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..parameter_server.http_server import HttpServer
from .publisher import WeightPublisher, urls_of

LOOK_S = 0.5
ANSWERS_WITHIN_S = 5.0
KEEPS = {"pause_mode": "keep"}
"""TRL's own client pauses so. TRL would train on the tokens of an aborted request as on a whole response, and its
rollouts end with an error if there are none."""


class TRLWeightTransfer:
    """TRL's `WeightTransferProtocol`. Used by one process, from one thread.

    A push pauses the servers itself, only while they load. So `pause` and `resume` do nothing, and servers generate
    while TRL gathers weights. Requests in flight continue with the new version. Versions count from 0, the weights
    before training.
    """

    def __init__(
        self,
        endpoints: Sequence[str] | Path,
        *,
        dtype: str | None = None,
        config: Mapping[str, Any] | None = None,
        report_path: Path | None = None,
        nodes: Sequence[str] = (),
        node_key: Path | None = None,
        server_timeout_s: float = 240.0,
        allow_nonfinite: bool = False,
    ) -> None:
        """As `WeightPublisher`. `server_timeout_s`: how long `init_weight_transfer` waits for servers to start.

        Raises ConfigError without an endpoint, and for a `pause_mode` that aborts requests.
        """
        urls_of(endpoints)
        settings = KEEPS | dict(config or {})
        if settings["pause_mode"] == "abort":
            raise ConfigError("checkpoint_engine.pause_mode=abort: TRL would train on aborted responses: keep, or wait")
        self._endpoints, self._server_timeout_s = endpoints, server_timeout_s
        self._options: dict[str, Any] = {
            "dtype": dtype,
            "config": settings,
            "report_path": report_path,
            "nodes": nodes,
            "node_key": node_key,
            "allow_nonfinite": allow_nonfinite,
        }
        self._held: dict[str, torch.Tensor] = {}
        """Copies on the host of the last push: TRL frees each tensor when it gathers the next."""
        self._publisher: WeightPublisher | None = None
        self._version = -1

    @property
    def version(self) -> int:
        """The version that every server serves; -1 before the first push."""
        return self._version

    def init_weight_transfer(self) -> None:
        """Wait until every server answers. Raises ConfigError naming one that does not within `server_timeout_s`."""
        deadline = time.monotonic() + self._server_timeout_s
        for url in urls_of(self._endpoints):
            server = HttpServer(url, timeout_s=ANSWERS_WITHIN_S)
            while not server.is_healthy(ANSWERS_WITHIN_S):
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"{url} does not answer within {self._server_timeout_s:g} s: is vLLM serving there?"
                    )
                time.sleep(LOOK_S)

    def pause(self) -> None:
        """Does nothing: the push pauses the servers."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Push the pairs of `iterator`: whole tensors under the server's names, each once.

        Raises as `WeightPublisher.push`; ConfigError for names or shapes other than those of the first push.
        """
        seen = set()
        for name, tensor in iterator:
            self._hold(name, tensor)
            seen.add(name)
        if missing := sorted(self._held.keys() - seen):
            raise ConfigError(f"TRL sent {len(missing)} tensors fewer than before: {', '.join(missing[:5])}")
        if self._publisher is None:
            self._publisher = WeightPublisher(self._held, self._endpoints, alone=True, **self._options)
        self._publisher.push(self._version + 1)
        self._version += 1

    def resume(self) -> None:
        """Does nothing: the push has resumed the servers."""

    def destroy(self) -> None:
        """Release the memory; servers keep their weights. Idempotent."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()
        self._held = {}

    def _hold(self, name: str, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        held = self._held.get(name)
        if held is None:
            if self._publisher is not None:
                raise ConfigError(f"TRL sent a tensor that it has not sent before: {name}")
            held = self._held[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        if (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
            raise ConfigError(
                f"TRL sent {name} with another shape or dtype than before: {list(tensor.shape)} {tensor.dtype}, and "
                f"{list(held.shape)} {held.dtype} before"
            )
        held.copy_(tensor)
