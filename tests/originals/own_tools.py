"""Tools for conversations, which verl and this project load by name."""

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Echo(BaseTool):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> tuple[ToolResponse, float, dict]:
        return ToolResponse(text=parameters["text"]), 0.5, {}
