"""`tool_agent`: the policy and its tools take turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.base import AgentLoopBase
from verl.experimental.agent_loop.errors import AgentLoopError
from verl.experimental.agent_loop.output import AgentLoopOutput, Response
from verl.experimental.agent_loop.tools import PARSERS, BaseTool, ToolCall, load_tools
from verl.utils.config import did_you_mean
from verl.workers.config import PPOConfig
from verl.workers.rollout.records import SamplingOptions, StopReason

# Stands for the assistant's message when we ask the chat template how tool answers are written.
_MARK = "\u241fassistant-message\u241f"


class ToolAgentLoop(AgentLoopBase):
    """Generates, executes the tools that the message calls, shows the answers to the policy, and again.

    Ends when a message calls no tool, after `multi_turn.max_assistant_turns` messages, or when the budget is used up.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.multi_turn = self.config.actor_rollout_ref.rollout.multi_turn
        self.tools = _tools(self.config)
        self.parse = PARSERS[self.multi_turn.format]

    @classmethod
    def shown_tools(cls, config: PPOConfig) -> Sequence[Any]:
        return [tool.schema for tool in _tools(config).values()]

    async def run(self, sampling_params: SamplingOptions, **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.prompt_tokens(kwargs, self.shown_tools(self.config))
        request_id = uuid4().hex
        response = Response(sampling_params.max_tokens)
        metrics = {"generate_s": 0.0, "tools_s": 0.0, "tool_calls": 0.0}
        num_turns, assistant_turns = 1, 0
        stop_reason: StopReason = "length"
        while response.room:
            started = time.monotonic()
            output = await self.server_manager.generate(
                request_id,
                prompt_ids=[*prompt_ids, *response.token_ids],
                sampling=replace(sampling_params, max_tokens=response.room),
            )
            metrics["generate_s"] += time.monotonic() - started
            response.add_generated(output)
            num_turns, assistant_turns, stop_reason = num_turns + 1, assistant_turns + 1, output.stop_reason
            if stop_reason != "completed" or assistant_turns == self.multi_turn.max_assistant_turns:
                break
            calls = self.parse(await self.text(output.token_ids))
            if not calls:
                break
            started = time.monotonic()
            answers = await asyncio.gather(*(self._answer(index, call) for index, call in enumerate(calls)))
            metrics["tools_s"] += time.monotonic() - started
            metrics["tool_calls"] += len(calls)
            answer_ids = await self._answer_tokens(answers, output.token_ids)
            if len(answer_ids) >= response.room:  # the policy could not say anything after them
                stop_reason = "length"
                break
            response.add_inserted(answer_ids)
            num_turns += 1
        return response.output(prompt_ids, num_turns=num_turns, stop_reason=stop_reason, metrics=metrics)

    async def _answer(self, index: int, call: ToolCall) -> str:
        """What the model is told about its call. A tool's failure is an answer, too; nothing of it ends the sample."""
        tool = self.tools.get(call.name)
        if call.error is not None:
            answer = f"error: {call.error}"
        elif index >= self.multi_turn.max_parallel_calls:
            answer = f"error: not executed; {self.multi_turn.max_parallel_calls} call(s) per message are"
        elif tool is None:
            answer = f"error: unknown tool {call.name!r}.{did_you_mean(call.name, self.tools)}"
        else:
            try:
                answer = str(await asyncio.wait_for(tool.execute(call.arguments), self.multi_turn.tool_timeout_s))
            except TimeoutError:
                answer = f"error: {call.name} did not answer within {self.multi_turn.tool_timeout_s} s"
            except Exception as exc:  # noqa: BLE001 - the model gets the error, as it would from any tool
                answer = f"error: {type(exc).__name__}: {exc}"
        limit = self.multi_turn.max_tool_response_length
        return answer if len(answer) <= limit else f"{answer[:limit]}...(truncated)"

    async def _answer_tokens(self, answers: Sequence[str], said: Sequence[int]) -> list[int]:
        """Everything that the chat template puts between the policy's message `said` and its next one."""
        conversation: list[dict[str, str]] = [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": _MARK},
            *({"role": "tool", "content": answer} for answer in answers),
        ]
        _, found, after = (await self.rendered(conversation)).rpartition(_MARK)
        if not found or not all(answer in after for answer in answers):
            raise AgentLoopError(
                "the tokenizer's chat template does not show messages of role 'tool'; "
                "set actor_rollout_ref.model.custom_chat_template to one that does"
            )
        end = str(self.tokenizer.eos_token)
        if said and said[-1] == self.tokenizer.eos_token_id:  # the policy has written its own end of message
            after = after.removeprefix(end)
        return await self.tokens(after)


def _tools(config: PPOConfig) -> dict[str, BaseTool]:
    path = config.actor_rollout_ref.rollout.multi_turn.tool_config_path
    return load_tools(path) if path else {}
