"""verl's base class of interactions."""

from __future__ import annotations

from typing import Any
from uuid import uuid4


class BaseInteraction:
    """One object per process, shared by all samples; it keeps a conversation's state by `instance_id`.

    A loop calls for every sample `start_interaction`, `generate_response` after each message of the policy without a
    tool call, and always `finalize_interaction`. They run on an event loop that only tools and interactions share,
    within `multi_turn.tool_timeout_s` each. Their errors end the run, naming the interaction.
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
        """Returns (whether the conversation is over, reply to the policy, score of its last message, anything else).

        `messages` are the prompt's and all later ones, up to the policy's last. The reply that ends a conversation is
        not shown.
        """
        return False, "Your current result seems acceptable.", await self.calculate_score(instance_id), {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """A score of the policy's last message."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the conversation."""
