"""Agent loops turn prompts into trajectories, many at once.

AgentLoopManager (driver) --samples--> AgentLoopWorker (Ray actors) --one AgentLoopBase per sample-->
    ServerManager (in the worker) --token ids--> rollout servers
"""

from verl.experimental.agent_loop.base import AgentLoopBase
from verl.experimental.agent_loop.errors import AgentLoopError, PromptTooLong
from verl.experimental.agent_loop.manager import AgentLoopManager
from verl.experimental.agent_loop.output import AgentLoopOutput, Response
from verl.experimental.agent_loop.registry import register
from verl.experimental.agent_loop.server_manager import ServerManager
from verl.experimental.agent_loop.single_turn import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_loop import ToolAgentLoop
from verl.experimental.agent_loop.tools import BaseTool
from verl.experimental.agent_loop.worker import AgentLoopWorker

AsyncLLMServerManager = ServerManager
"""verl's name for `ServerManager`."""

__all__ = [
    "AgentLoopBase",
    "AgentLoopError",
    "AgentLoopManager",
    "AgentLoopOutput",
    "AgentLoopWorker",
    "AsyncLLMServerManager",
    "BaseTool",
    "PromptTooLong",
    "Response",
    "ServerManager",
    "SingleTurnAgentLoop",
    "ToolAgentLoop",
    "register",
]
