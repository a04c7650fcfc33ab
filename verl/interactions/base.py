"""verl's base class of interactions."""

from __future__ import annotations

from typing import Any
from uuid import uuid4


class BaseInteraction:
    """One object per process, shared by all samples; what belongs to one conversation is kept by its `instance_id`.

    For every sample: `start_interaction`, `generate_response` after each message of the policy that calls no tool, and
    `finalize_interaction`, whatever happened in between. They run on an event loop that only tools and interactions
    share, within `multi_turn.tool_timeout_s` each; what they raise ends the run, by the interaction's name.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """`config` is that of the entry in the YAML file."""
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """The id of this conversation. `kwargs` are the sample's `interaction_kwargs`."""
        return instance_id or uuid4().hex

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Whether the conversation is over, what the policy is told, a score of its last message, and anything else.

        `messages` are the prompt's and all that was said since, the policy's last one at the end. What is said to a
        conversation that is over is not shown.
        """
        return False, "Your current result seems acceptable.", await self.calculate_score(instance_id), {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """A score of what the policy has said last."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the conversation."""
