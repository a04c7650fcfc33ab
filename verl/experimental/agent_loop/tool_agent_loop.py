"""verl's import path of the loop with tools."""

from verl.experimental.agent_loop.tool_loop import ToolAgentLoop

__all__ = ["ToolAgentLoop"]
