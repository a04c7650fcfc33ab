"""The interfaces that the checkpoint engine needs of trainers and rollout engines, one small Protocol each.

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

        Names are those of the Hugging Face checkpoint, dtypes those that the engine will receive. Tied weights appear
        once.
        """

    def shards(self) -> Sequence[Shard]:
        """The non-empty parts that this rank holds."""

    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        """Write the values of `shard`, which lies inside one of `shards()`, into `destination`, cast to its dtype.

        `destination` has the shape of `shard.box` and the dtype of the spec. It may be strided, or on the device of
        the values, and is borrowed for the call. A copy from a CUDA device into pinned memory may end later: it is
        queued on the device's current stream, for which the caller then waits.
        """


@runtime_checkable
class ViewableSource(WeightSource, Protocol):
    """A source that also returns views of host memory: publishing digests them while the core's cache holds them."""

    def view(self, shard: Shard) -> torch.Tensor | None:
        """The values of `shard`, which lies inside one of `shards()`: contiguous, on the CPU, in the dtype of the spec.

        Borrowed until the next call. None if memory does not hold them so; publishing then calls `copy`.
        """


@runtime_checkable
class DeviceSource(WeightSource, Protocol):
    """A source that also reports the device of its values: publishing compares versions on an accelerator."""

    @property
    def device(self) -> torch.device | None:
        """The device of all values; None if there are several. It may change between syncs (offloading)."""


class OnlyLoads:
    """Methods that do nothing, for a `Replica` without users' requests that shares no accelerator with a trainer."""

    async def _nothing(self, *_: object) -> None:
        pass

    pause = resume = health = sleep = wake_up = release_kv_cache = resume_kv_cache = _nothing


class Replica(Protocol):
    """One rollout engine, which may span several tensor-parallel ranks. Called by the manager on the driver.

    Every method is safe to call again after a failure. A method that raises quarantines the replica.
    """

    @property
    def name(self) -> str:
        """A name that is unique in the job, for messages: `replica-0`."""

    @property
    def node_index(self) -> int:
        """Index of the rollout node whose arena this replica reads."""

    async def pause(self, mode: str) -> None:
        """Stop generating; `mode` (abort, wait, keep) decides about requests in flight. Idempotent."""

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
        """Raises an error if the engine does not answer."""

    async def sleep(self) -> None:
        """Free weights and KV cache, if the engine can; otherwise only log that."""

    async def wake_up(self) -> None:
        """Allocate weights and KV cache again, without content."""

    async def release_kv_cache(self) -> None:
        """Free the KV cache alone."""

    async def resume_kv_cache(self) -> None:
        """Allocate the KV cache again."""
