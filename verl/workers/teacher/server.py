"""The Ray actor around one engine of a teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.utils.lifetime import begin_actor
from verl.workers.rollout.engine import EngineSpec
from verl.workers.teacher.scores import Scores

if TYPE_CHECKING:
    from verl.workers.teacher.vllm_scoring import ScoringEngine


class TeacherServer:
    """One engine with its model's own weights. All methods run on the actor's event loop."""

    def __init__(self, spec: EngineSpec, num_candidates: int) -> None:
        begin_actor()
        self._spec, self._num_candidates = spec, num_candidates
        self._engine: ScoringEngine | None = None
        self._asked = 0

    async def start(self) -> None:
        """Start the engine; return when it can `score`. Raises ConfigError, RolloutError."""
        from verl.workers.teacher.vllm_scoring import ScoringEngine

        self._engine = ScoringEngine(self._spec, self._num_candidates)
        await self._engine.start()

    async def score(self, token_ids: list[int], count: int) -> Scores:
        """Score the last `count` of `token_ids`. Raises RolloutError."""
        assert self._engine is not None  # `start` comes first
        self._asked += 1
        return await self._engine.score(token_ids, count, f"score-{self._asked}")

    async def shutdown(self) -> None:
        if self._engine is not None:
            await self._engine.shutdown()
