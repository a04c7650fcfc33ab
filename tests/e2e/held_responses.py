"""For `model.external_lib`: an engine in which every sync finds a response in flight, whoever is faster.

When it has completed `OF_A_STEP` responses with a version, all that the trainer needs before it brings the next one, it
begins another and goes on with that when it is paused. Transformers decode; the order alone is decided here. With the
version after step `STEPS`, the last, it validates: then nothing is held.
"""

from __future__ import annotations

from verl.workers.rollout import RolloutReplicaRegistry
from verl.workers.rollout.hf.engine import HFEngine
from verl.workers.rollout.hf.replica import HFReplica

STEPS = 4
OF_A_STEP = 2
BEGUN = 10
"""Tokens of the response that is held."""
OVERRIDES = (
    f"actor_rollout_ref.model.external_lib={__name__}",
    "actor_rollout_ref.rollout.name=held",
    "actor_rollout_ref.rollout.max_num_seqs=1",
)


@RolloutReplicaRegistry.register("held")
class HeldReplica(HFReplica):
    engine = f"{__name__}:HoldingEngine"


class HoldingEngine(HFEngine):
    _complete = 0
    """Responses, since the version was loaded."""

    async def pause(self, mode: str) -> None:
        async with self._changed:
            self._pause_mode = mode
            self._changed.notify_all()
        await super().pause(mode)

    async def activate(self, arena_path: str, version: int) -> None:
        await super().activate(arena_path, version)
        self._complete = 0

    def _can_step(self) -> bool:
        holds = self._complete >= OF_A_STEP and self._version < STEPS and self._pause_mode is None
        begun = bool(self._active) and len(self._active[0].tokens) >= BEGUN
        return super()._can_step() and not (holds and begun)

    def _record(self, tokens: list[int], log_probs: list[float]) -> None:
        before = len(self._active)
        super()._record(tokens, log_probs)
        self._complete += before - len(self._active)
