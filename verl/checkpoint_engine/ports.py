"""What the checkpoint engine asks of the outside: trainers, rollout engines. One small Protocol per need.

`verl.workers` implements these over Ray, FSDP and vLLM; tests implement them in a few lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from .plan.types import EngineCheckResult, Shard, TensorSpec

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """The weights of one trainer rank. Called on that rank only; none of its methods is a collective."""

    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor of the whole model that the rollout engine needs, equal and in equal order on every rank.

        Names are those of the Hugging Face checkpoint; dtypes are what the engine will receive. Tied weights appear
        once.
        """

    def shards(self) -> Sequence[Shard]:
        """The non-empty parts that this rank holds."""

    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        """Write the values of `shard`, which lies inside one of `shards()`, into `destination`, casting on the way.

        `destination` has the shape of `shard.box` and the dtype of the spec; it may be strided, or on the device of
        the values, and is borrowed for the call. Only what goes from a CUDA device into pinned memory may arrive later:
        it is ordered on the device's current stream, which whoever asks then waits for.
        """


@runtime_checkable
class ViewableSource(WeightSource, Protocol):
    """A source that can also show what lies in host memory: publishing then digests it while the cache has it."""

    def view(self, shard: Shard) -> torch.Tensor | None:
        """The values of `shard`, which lies inside one of `shards()`: contiguous, on the CPU, in the dtype of the spec.

        None where they do not lie like that; `copy` is called for those. Borrowed until the next call.
        """


@runtime_checkable
class DeviceSource(WeightSource, Protocol):
    """A source that can also say where its values are: on an accelerator, publishing compares versions there."""

    @property
    def device(self) -> torch.device | None:
        """Of all values; None if they are on several. It may be another one at the next sync (offloading)."""


class OnlyLoads:
    """The rest of a `Replica` that nothing runs beside, which has memory and requests of nobody else."""

    async def _nothing(self, *_: object) -> None:
        pass

    pause = resume = health = sleep = wake_up = release_kv_cache = resume_kv_cache = _nothing


class Replica(Protocol):
    """One rollout engine, which may span several tensor-parallel ranks. Called by the manager on the driver.

    Every method is safe to call again after a failure. A method that raises quarantines the replica.
    """

    @property
    def name(self) -> str:
        """Unique among the replicas of a job, for messages: `replica-0`."""

    @property
    def node_index(self) -> int:
        """Index of the rollout node whose arena this replica reads."""

    async def pause(self, mode: str) -> None:
        """Stop generating; `mode` (abort, wait, keep) says what happens to requests in flight. Idempotent."""

    async def activate(self, arena_path: str, version: int) -> EngineCheckResult | None:
        """Load `version` from the arena at `arena_path` into every rank. Called while paused.

        The engine checks that the arena's committed version is `version`, that all of the model's weights are loaded,
        and drops prefix caches. If it can, it also compares the weights it then computes with against the version, and
        reports the result: `checkpoint_engine.check_engine`.

        Raises ActivationError; IntegrityError, naming tensors, if the engine computes with other weights.
        """

    async def resume(self) -> None:
        """Generate again. Idempotent."""

    async def health(self) -> None:
        """Return if the engine answers; raise otherwise."""

    async def sleep(self) -> None:
        """Free weights and KV cache, if the engine can; otherwise only log that."""

    async def wake_up(self) -> None:
        """Allocate weights and KV cache again, without content."""

    async def release_kv_cache(self) -> None:
        """Free the KV cache alone."""

    async def resume_kv_cache(self) -> None:
        """Allocate the KV cache again."""
