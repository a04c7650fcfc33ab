"""A user who knows the number and tells the policy whether its answer is right."""

from __future__ import annotations

from typing import Any

from verl.interactions.base import BaseInteraction
from verl.utils.reward_score import gsm8k


class Gsm8kInteraction(BaseInteraction):
    """Ends when the last number of a message is the sample's `ground_truth`; asks again as long as it is not."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._truths: dict[str, str] = {}
        self._answers: dict[str, str] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        """Raises ValueError for a sample without `ground_truth`."""
        if ground_truth is None:
            raise ValueError("interaction_kwargs has no ground_truth")
        instance_id = await super().start_interaction(instance_id)
        self._truths[instance_id] = str(ground_truth)
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        self._answers[instance_id] = said[-1] if said else ""
        score = await self.calculate_score(instance_id)
        if score == 1.0:
            return True, "That is right.", score, {}
        return False, "That is not right. Think it over, and give another answer.", score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        answer, truth = self._answers.get(instance_id, ""), self._truths[instance_id]
        return float(gsm8k.compute_score(answer, truth, method="flexible", format_score=0.0, score=1.0))

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._truths.pop(instance_id, None)
        self._answers.pop(instance_id, None)
