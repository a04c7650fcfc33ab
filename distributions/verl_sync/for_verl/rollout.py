"""The rollout adapter: under verl's own trainer, weights reach its vLLM servers as transactions of this project.

    +actor_rollout_ref.rollout.engine_kwargs.vllm.weight_transfer_config.backend=verl_sync_for_verl

Each sync is published into an arena in shared memory, digested, verified, committed and then loaded by every server, or
by none of them. Everything else is what verl's adapter does; without that line it does all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from verl.workers.rollout.vllm_rollout import ServerAdapter as VerlServerAdapter

from ..errors import ActivationError, ConfigError
from ..publisher.model_source import ModelSource
from ..publisher.ranks import rank_and_size
from .held import Gathered, ShardedWeights, Shards
from .publisher import Tensors, VerlPublisher, everywhere
from .registration import ENGINE, SWITCH

logger = logging.getLogger(__name__)
OPTIONS = "verl_sync"
"""Of `rollout.checkpoint_engine.engine_kwargs`: keys of our `checkpoint_engine`, and `report_path`."""


class ServerAdapter(VerlServerAdapter):
    """verl makes one on every actor rank."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._publisher: VerlPublisher | None = None
        self._gathered: Gathered | None = None
        """None once this rank's shards are published instead."""
        self._shards: Shards | None = None
        self._syncs = 0

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **options: Any
    ) -> None:
        """Every rank calls it. Raises SyncAborted: servers then serve the version before, and verl's job ends.

        Raises ConfigError for what the adapter cannot send.
        """
        if not self._is_wanted():
            await super().update_weights(weights, global_steps=global_steps, wire_format=wire_format, **options)
            return
        if hasattr(weights, "__aiter__"):
            raise ConfigError(
                "the rollout adapter of verl_sync is for trainers with their servers beside them: for rollout workers "
                f"of their own take {SWITCH} out, and name the backend verl_sync.for_verl.backend"
            )
        if wire_format != "named_tensors" or options.get("peft_config") is not None:
            sent = wire_format if options.get("peft_config") is None else "LoRA adapters"
            raise ConfigError(f"the rollout adapter of verl_sync sends whole weights, not {sent}: take {SWITCH} out")
        # On the thread of the caller, though it blocks the loop: gathering uses its device and its process group.
        self.push(weights)
        if self._server() is not None and global_steps is not None:
            await self.server_handle.set_global_steps.remote(global_steps)

    def push(self, weights: Any) -> None:
        if self._publisher is None:
            self._publisher = self._make_publisher(weights)
        elif self._gathered is not None:
            self._gathered.gather(weights)
        elif self._shards is not None:
            self._shards.refresh()
        self._syncs += 1
        self._publisher.push(self._syncs)

    def _make_publisher(self, weights: Any) -> VerlPublisher:
        shards = Shards(weights.shards) if isinstance(weights, ShardedWeights) else None
        gathered = Gathered(weights, keeps=rank_and_size()[0] == 0, shards=shards)
        source: ModelSource = gathered
        if shards is not None and not (why := next(filter(None, everywhere(shards.why_not)), "")):
            self._shards, source = shards, ModelSource(shards.tensors, shards.dtype)
        else:
            self._gathered = gathered
            if shards is not None:
                logger.warning("every sync gathers the weights on rank 0, because %s", why)
        options = dict(self.config.checkpoint_engine.engine_kwargs.get(OPTIONS, {}))
        path = options.pop("report_path", None)
        return VerlPublisher(source, self._server(), config=options, report_path=Path(path) if path else None)

    def _is_wanted(self) -> bool:
        transfer = (self.config.engine_kwargs.get("vllm") or {}).get("weight_transfer_config") or {}
        return isinstance(transfer, Mapping) and transfer.get("backend") == ENGINE

    def _server(self) -> VllmServer | None:
        return VllmServer(self.server_handle) if self._ensure_server_handle() else None


class VllmServer:
    """A `Server` of `publisher.py`: verl's Ray actor with an `AsyncLLM` in it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def check(self, tensors: Tensors) -> None:
        listed = {name: (dtype, list(shape)) for name, (dtype, shape) in tensors.items()}
        await self._workers("init_weight_transfer_engine", init_info={"tensors": listed})

    async def pause(self) -> None:
        """Nothing: verl has no request under way during a sync, and workers load a version in one call, so that no
        forward pass computes with two. (Its own call to pause fails with vLLM 0.32.)"""

    async def activate(self, arena_path: str, version: int) -> None:
        await self._workers("start_weight_update")
        try:
            await self._workers("update_weights", update_info={"arena_path": arena_path, "version": version})
        except ActivationError:
            with suppress(ActivationError):  # of its workers, one has raised; the others wait for this
                await self._workers("finish_weight_update")
            raise
        await self._workers("finish_weight_update")
        await _answer(self._handle.clear_kv_cache.remote())

    async def resume(self) -> None:
        """It has not been stopped."""

    async def health(self) -> None:
        await _answer(self._handle.get_server_address.remote())

    async def _workers(self, method: str, **named: Any) -> None:
        await _answer(self._handle.collective_rpc.remote(method, kwargs=named))


async def _answer(reference: ray.ObjectRef[Any]) -> None:
    try:
        await reference
    except RayError as exc:
        raise ActivationError(str(exc)) from exc
