"""verl's import path of agent loops, their workers and managers."""

from verl.experimental.agent_loop.base import AgentLoopBase, DictConfigWrap
from verl.experimental.agent_loop.manager import AgentLoopManager
from verl.experimental.agent_loop.output import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.registry import register
from verl.experimental.agent_loop.server_manager import ServerManager as AsyncLLMServerManager
from verl.experimental.agent_loop.worker import AgentLoopWorker

__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentLoopWorker",
    "AsyncLLMServerManager",
    "DictConfigWrap",
    "register",
]
