"""The backend `verl_sync` of PyPI's verl: every byte that a rollout worker gets has the digest that the trainer took.

    actor_rollout_ref.rollout.checkpoint_engine.backend=verl_sync
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_sync.for_verl.backend

verl gathers each tensor; the first rank of the actor copies it into an arena in shared memory. Rollout workers of the
same host map the version, digest all of it anew, and hand views of it to verl's own loader.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import torch

from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from ..errors import ConfigError, TransportError, TransportTimeout
from ..memory.committed import committed_version
from .published import NamedTensors, PublishedWeights, host_id, job_name, verified

NAME = "verl_sync"
POLL_S = 0.01


@CheckpointEngineRegistry.register(NAME)
class VerlSyncEngine(CheckpointEngine):
    """verl makes one on every actor rank and rollout worker, and calls its methods for each sync in this order."""

    def __init__(self, bucket_size: int, is_master: bool = False, *, slots: int = 2, timeout_s: float = 600.0) -> None:
        """`bucket_size` is verl's, and not needed. The others come from `checkpoint_engine.engine_kwargs.verl_sync`."""
        if slots not in (1, 2) or not timeout_s > 0:
            raise ConfigError(f"engine_kwargs.{NAME}: slots is 1 or 2, timeout_s positive: {slots=}, {timeout_s=}")
        self._timeout_s = timeout_s
        self._published = PublishedWeights(job=job_name(), slots=slots) if is_master else None
        self._syncs = 0
        self._number = 0
        """Of the sync that is going on. verl's own number of the step may be missing, or come twice."""
        self._arena_path = ""

    def prepare(self) -> dict[str, Any]:
        if self._published is None:
            return {"host": host_id()}
        self._syncs += 1
        return {"host": host_id(), "arena_path": self._published.path, "number": self._syncs}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Raises ConfigError if a rollout worker is on another host than the first actor rank."""
        first = next(found for found in metadata if "arena_path" in found)
        away = sum(found["host"] != first["host"] for found in metadata[actor_wg_world_size:])
        if away:
            raise ConfigError(
                f"checkpoint_engine.backend={NAME}: {away} of {rollout_world_size} rollout workers do not share the "
                "memory of the first actor rank; across hosts use verl's nccl, or train with verl-sync"
            )
        told = {"arena_path": first["arena_path"], "number": first["number"]}
        return tuple(  # type: ignore[return-value]
            {key: [value] * size for key, value in told.items()} for size in (actor_wg_world_size, rollout_world_size)
        )

    def init_process_group(self, arena_path: str, number: int) -> None:
        self._arena_path, self._number = arena_path, number

    def finalize(self) -> None:
        """The arena stays for the next sync; it goes with the process of the first rank."""

    async def send_weights(self, weights: NamedTensors, global_steps: int | None = None) -> None:
        """Every rank of the actor iterates over `weights`, because that gathers them; the first one keeps them."""
        if self._published is None:
            for _ in weights:
                pass
            return
        self._published.publish(self._number, weights)  # on this thread, whose device is that of the gather

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Read-only views, borrowed until the iterator goes on to its end.

        Raises TransportTimeout if the version of this sync is not there in time, IntegrityError if it is another one
        than the trainer published.
        """
        until_s = time.monotonic() + self._timeout_s
        while (there := committed_version(self._arena_path)) != self._number:
            if there is not None and there > self._number:
                raise TransportError(f"the trainer is at sync {there} already, this is {self._number}", phase="stage")
            if time.monotonic() > until_s:
                raise TransportTimeout(
                    f"the first actor rank has not published sync {self._number} within {self._timeout_s:g} s; in its "
                    f"arena {self._arena_path} is {'nothing' if there is None else f'sync {there}'}",
                    phase="stage",
                )
            await asyncio.sleep(POLL_S)
        with verified(self._arena_path, self._number) as tensors:
            for name, tensor in tensors:
                yield name, tensor
