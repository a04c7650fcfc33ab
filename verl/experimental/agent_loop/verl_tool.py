"""Calls tools written for verl as verl does."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from verl.checkpoint_engine.support.registry import require_keywords
from verl.experimental.agent_loop.tools import AgentData, BaseTool
from verl.tools.base_tool import BaseTool as ToolOfVerl
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.config import ConfigError


class VerlTool(BaseTool):
    """Adapts a tool written for verl: `answer` creates, executes and releases an instance."""

    def __init__(self, tool: ToolOfVerl) -> None:
        """Raises ConfigError for a tool whose methods do not accept verl's arguments."""
        self.tool = tool
        self.idempotent = getattr(tool, "idempotent", False)
        super().__init__(tool.config, tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True))
        for method, arguments in (
            (tool.execute, ("instance_id", "parameters", "agent_data")),
            (tool.calc_reward, ("instance_id",)),
            (tool.release, ("instance_id",)),
        ):
            require_positional(method, arguments, f"tool {self.name}")

    @classmethod
    def from_entry(cls, tool_class: type[ToolOfVerl], config: Any, schema: Any, where: str) -> VerlTool:
        """The tool of an entry of the YAML file. Raises ConfigError for an invalid schema."""
        try:
            parsed = OpenAIFunctionToolSchema.model_validate(schema) if schema is not None else None
        except ValidationError as exc:
            raise ConfigError(f"{where}: tool_schema: {' '.join(str(exc).split())}") from exc
        require_keywords(tool_class, ("config", "tool_schema"), where)
        return cls(tool_class(config=dict(config or {}), tool_schema=parsed))

    async def execute(self, arguments: dict[str, Any]) -> Any:
        return await self.answer(arguments, AgentData())

    async def outcome(self, arguments: dict[str, Any], idempotency_key: str) -> Any:
        """Of the tool's own `outcome`, if it has one."""
        own = getattr(self.tool, "outcome", super().outcome)
        answer = own(arguments, idempotency_key)
        return await answer if inspect.isawaitable(answer) else answer

    async def answer(self, arguments: dict[str, Any], agent_data: AgentData) -> ToolResponse:
        """What the tool answers; its rewards go to `agent_data`."""
        options: Mapping[str, Any] = agent_data.tools_kwargs.get(self.name) or {}
        created = await self._create(options.get("create_kwargs") or {})
        instance_id = created[0] if isinstance(created, tuple) else created
        try:
            result = await self.tool.execute(instance_id, arguments, agent_data=agent_data)
            response, reward = self._response_and_reward(result)
            if reward is not None:
                agent_data.tool_rewards.append(float(reward))
            score = await self.tool.calc_reward(instance_id)
            if score is not None:
                agent_data.reward_scores[self.name] = float(score)
        finally:
            await self.tool.release(instance_id)
        return response

    async def _create(self, create_kwargs: Mapping[str, Any]) -> Any:
        """As verl 0.9 passes them, together; or one by one, to a tool that has no place for that."""
        try:
            inspect.signature(self.tool.create).bind(create_kwargs=create_kwargs)
        except TypeError:
            return await self.tool.create(**create_kwargs)
        return await self.tool.create(create_kwargs=dict(create_kwargs))

    def _response_and_reward(self, result: Any) -> tuple[ToolResponse, float | None]:
        if not (isinstance(result, tuple) and len(result) == 3 and isinstance(result[0], ToolResponse | str)):
            raise TypeError(f"{self.name}.execute returns (ToolResponse, reward, metrics), not {result!r}")
        return ToolResponse(text=result[0]) if isinstance(result[0], str) else result[0], result[1]


def require_positional(method: Any, arguments: tuple[str, ...], what: str) -> None:
    """Raises ConfigError unless `method` accepts `instance_id` and `parameters` by position, and the rest by name."""
    placed = [name for name in arguments if name in ("instance_id", "parameters")]
    named = dict.fromkeys(name for name in arguments if name not in placed)
    try:
        inspect.signature(method).bind(*placed, **named)
    except TypeError as exc:
        signature = f"{method.__qualname__}{inspect.signature(method)}"
        raise ConfigError(f"{what}: {signature} cannot take ({', '.join(arguments)}): {exc}") from exc
