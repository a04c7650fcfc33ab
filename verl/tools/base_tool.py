"""verl's base class of tools: an instance of its own for every call, from `create` to `release`."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.config import ConfigError


class BaseTool:
    """One object per process, shared by all samples; what belongs to one call is kept by its `instance_id`.

    For every call of the model: `create`, `execute`, `calc_reward`, and `release`, whatever happened in between.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        """Both are those of the tool's entry in the YAML file. Raises ConfigError for a tool without a schema."""
        self.config = config
        schema = tool_schema or self.get_openai_tool_schema()
        if schema is None:
            raise ConfigError(f"tool {type(self).__name__} has no schema: give its entry a tool_schema")
        self.tool_schema = schema
        self.name = schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """The schema of a tool whose entry has none."""
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """The id of this call. `create_kwargs` are the sample's `tools_kwargs[name]["create_kwargs"]`."""
        return instance_id or uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """The answer, a reward for this step, and metrics. `agent_data` is what is known of the sample."""
        return ToolResponse(text=""), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """A reward for the state that the call has led to."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the call."""
