"""Trivial loops and tools."""

import asyncio

from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput, BaseTool


class ConstantLoop(AgentLoopBase):
    """Returns what its options and its sample say, without asking any server."""

    def __init__(self, *, token=1, **kwargs):
        super().__init__(**kwargs)
        self.token = token

    async def run(self, sampling_params, **kwargs):
        return AgentLoopOutput(
            prompt_ids=[1],
            response_ids=[self.token],
            response_mask=[1],
            response_logprobs=[-0.25] if sampling_params["logprobs"] else None,
            response_versions=[0],
            num_turns=2,
            stop_reason="completed",
        )


class AddTool(BaseTool):
    schema = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
    default_config = {"unit": ""}

    async def execute(self, arguments):
        if arguments.get("sleep"):
            await asyncio.sleep(60)
        return f"{arguments['a'] + arguments['b']}{self.config['unit']}"
