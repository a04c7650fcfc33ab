"""`tool_agent`: the policy and its tools take turns."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from verl.experimental.agent_loop.base import AgentLoopBase, pictures_of
from verl.experimental.agent_loop.errors import AgentLoopError
from verl.experimental.agent_loop.interaction import Partner, conversation, interactions_of
from verl.experimental.agent_loop.output import AgentLoopOutput, Response
from verl.experimental.agent_loop.thinking import Reasoning, outside
from verl.experimental.agent_loop.tool_answers import ToolThread, cut
from verl.experimental.agent_loop.tool_calls import ToolAnswer
from verl.experimental.agent_loop.tool_files import load_tools
from verl.experimental.agent_loop.tool_parser import ToolParser, in_tokenizer_thread
from verl.experimental.agent_loop.tools import AgentData, BaseTool, ToolCall
from verl.tools.schemas import ToolResponse
from verl.utils.chat_template import turns_of, well_formed
from verl.utils.config import ConfigError, did_you_mean
from verl.utils.pictures import (
    MULTI_MODAL_DATA,
    Picture,
    PictureError,
    by_kind,
    data_of,
    keep,
    media_in,
    pixel_limits,
)
from verl.workers.config import PPOConfig
from verl.workers.rollout.records import SamplingOptions, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_tools_thread = ToolThread()


class ToolAgentLoop(AgentLoopBase):
    """Repeats: generate a message, execute the tools that it calls, show their answers to the policy.

    The sample's interaction, if any, answers a message without calls, until it ends the conversation. The loop ends
    without an answer, after `multi_turn.max_assistant_turns` messages if set, or when the budget is used up.

    Pictures of tools follow those of the prompt. Models take the first tokens for pictures as them: if the policy has
    written such a token itself, an answer with a picture ends the response, as one that is too long.
    """

    sees = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.multi_turn = self.config.actor_rollout_ref.rollout.multi_turn
        self.tools = _tools(self.config)
        self.interactions = interactions_of(self.config)
        self.parser = ToolParser.get_tool_parser(self.multi_turn.format, self.tokenizer)
        self.reasoning = Reasoning.of(self.tokenizer)

    @classmethod
    def shown_tools(cls, config: PPOConfig) -> Sequence[Any]:
        return [tool.schema for tool in _tools(config).values()]

    @classmethod
    def check_tokenizer(cls, config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        turns_of(tokenizer, cls.shown_tools(config), config.data.apply_chat_template_kwargs).require_tool_answers()
        ToolParser.get_tool_parser(config.actor_rollout_ref.rollout.multi_turn.format, tokenizer)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        shown = self.shown_tools(self.config)
        prompt_ids = await self.prompt_tokens(kwargs, shown)
        sampling = SamplingOptions.of(sampling_params)
        ends = () if sampling.ignore_eos else (await self.turns(shown)).stop_token_ids
        ends = (*ends, *self.parser.stop_token_ids)
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *ends))
        agent_data = _agent_data(await self.tool_calls.request_id(), kwargs)
        async with conversation(
            self.interactions, kwargs, agent_data.request_id, _tools_thread, self.multi_turn.tool_timeout_s
        ) as partner:
            whole = await self._taken_turns(prompt_ids, sampling, agent_data, partner)
        rewards = {"tool_rewards": agent_data.tool_rewards, "reward_scores": agent_data.reward_scores}
        if partner is not None:
            rewards["turn_scores"] = partner.turn_scores
        return replace(whole, extra_fields={**agent_data.extra_fields, **{k: v for k, v in rewards.items() if v}})

    async def _taken_turns(
        self, prompt_ids: Sequence[int], sampling: SamplingOptions, agent_data: AgentData, partner: Partner | None
    ) -> AgentLoopOutput:
        response = Response(sampling.max_tokens)
        metrics = {"generate_s": 0.0, "tools_s": 0.0, "tool_calls": 0.0}
        num_turns, assistant_turns = 1, 0
        stop_reason: StopReason = "length"
        request_id = uuid4().hex  # an attempt before may have left requests with its own on servers
        while response.room:
            started = time.monotonic()
            context = [*prompt_ids, *response.token_ids]
            seen = data_of(by_kind(agent_data.pictures))
            output = await self.server_manager.generate(
                request_id,
                prompt_ids=context,
                sampling_params=replace(sampling, max_tokens=response.room),
                **seen,
            )
            metrics["generate_s"] += time.monotonic() - started
            response.add_generated(output)
            num_turns, assistant_turns, stop_reason = num_turns + 1, assistant_turns + 1, output.stop_reason
            if stop_reason != "completed" or assistant_turns == self.multi_turn.max_assistant_turns:
                break
            started = time.monotonic()
            calls = await self._calls(output.token_ids, context)
            replies = await self._replies(calls, context, output.token_ids, agent_data, partner)
            metrics["tools_s"] += time.monotonic() - started
            metrics["tool_calls"] += len(calls)
            if not replies:
                break
            reply_ids = await self._reply_tokens(replies, output.token_ids)
            shown = pictures_of(replies)
            ambiguous = shown and response.has_generated(self.pictures.token_id if self.pictures else None)
            if len(reply_ids) >= response.room or ambiguous:  # the policy could not say anything after them
                stop_reason = "length"
                break
            response.add_inserted(reply_ids)
            agent_data.pictures += shown
            num_turns += 1
        whole = response.output(list(prompt_ids), num_turns=num_turns, stop_reason=stop_reason, metrics=metrics)
        return replace(whole, multi_modal_data=by_kind(agent_data.pictures) if agent_data.pictures else None)

    async def _calls(self, said: Sequence[int], context: Sequence[int]) -> list[ToolCall]:
        """In a message of the policy; `context` is all that it was written after."""
        if self.multi_turn.ignore_calls_in_thinking:
            said = await in_tokenizer_thread(outside, said, context, self.reasoning, self.decoded)
        return await self.parser.calls(said, self.shown_tools(self.config))

    async def _replies(
        self,
        calls: Sequence[ToolCall],
        context: Sequence[int],
        said: Sequence[int],
        agent_data: AgentData,
        partner: Partner | None,
    ) -> list[dict[str, Any]]:
        """What others say to a message of the policy: the tools that it calls, or else the partner. Empty: nobody."""
        conversation = [*context, *said]
        if partner is None:
            return await self._answers(calls, conversation, agent_data) if calls else []
        text = await self.parser.text(said, skip_special_tokens=True)
        agent_data.messages.append({"role": "assistant", "content": text})
        if calls:
            replies = await self._answers(calls, conversation, agent_data)
        else:
            reply = await partner.reply(agent_data)
            replies = [{"role": "user", "content": well_formed(reply)}] if reply is not None else []
        agent_data.messages += replies
        return replies

    async def _answers(
        self, calls: Sequence[ToolCall], conversation: Sequence[int], agent_data: AgentData
    ) -> list[dict[str, Any]]:
        """A message for each call that may be executed, and one for all others together."""
        most = self.multi_turn.max_parallel_calls
        answers: list[Any] = await asyncio.gather(
            *(self._answer(call, conversation, number, agent_data) for number, call in enumerate(calls[:most]))
        )
        if len(calls) > most:
            more = f" ({len(calls) - most} were not)" if len(calls) > most + 1 else ""
            answers.append(f"error: not executed; {most} call(s) per message are{more}")
        names = [call.name if call.name in self.tools else "unknown" for call in calls[: len(answers)]]
        return [{"role": "tool", "name": name, "content": answer} for name, answer in zip(names, answers, strict=True)]

    async def _answer(
        self, call: ToolCall, conversation: Sequence[int], number: int, agent_data: AgentData
    ) -> str | list[dict[str, Any]]:
        """What the model is told about its call: a text, or parts with pictures before the text.

        A tool's failure is an answer, too; nothing of it ends the sample. Raises AgentLoopError for what the model
        cannot see.
        """
        tool = self.tools.get(call.name)
        if call.error is not None:
            return self._cut(f"error: {call.error}")
        if tool is None:
            return self._cut(f"error: unknown tool {call.name!r}.{did_you_mean(call.name, self.tools)}")
        key = await self.tool_calls.key(conversation, number)
        answer = await self.tool_calls.answer(
            key,
            idempotent=tool.idempotent,
            execute=partial(self._executed, tool, call, agent_data, key),
            outcome=partial(self._executed, tool, call, agent_data, key, has_begun=True),
        )
        agent_data.tool_rewards += answer.rewards
        agent_data.reward_scores |= answer.scores
        agent_data.extra_fields |= answer.extra_fields
        return answer.content

    async def _executed(
        self, tool: BaseTool, call: ToolCall, agent_data: AgentData, key: str, *, has_begun: bool = False
    ) -> ToolAnswer:
        own = agent_data.for_call(key)
        response = await _tools_thread.answer(
            tool, call.arguments, own, timeout_s=self.multi_turn.tool_timeout_s, has_begun=has_begun
        )
        return ToolAnswer(
            await self._content(tool, response),
            own.tool_rewards[len(agent_data.tool_rewards) :],
            _added(agent_data.reward_scores, own.reward_scores),
            _added(agent_data.extra_fields, own.extra_fields),
        )

    async def _content(self, tool: BaseTool, response: ToolResponse) -> str | list[dict[str, Any]]:
        answer, images = response.text or "", response.image or ()
        if response.video:
            raise AgentLoopError(f"tool {tool.name!r} answers with a video, and tools show pictures alone")
        if images and self.pictures is None:
            raise AgentLoopError(f"tool {tool.name!r} answers with a picture, and the model reads text alone")
        try:
            parts = [{"type": "image", "image": await self._kept(image)} for image in images]
        except PictureError as exc:
            answer, parts = f"error: a picture of {tool.name} {exc}", []
        answer = self._cut(answer)
        return [*parts, *([{"type": "text", "text": answer}] if answer else [])] if parts else answer

    def _cut(self, answer: str) -> str:
        return cut(answer, self.multi_turn.max_tool_response_length, self.multi_turn.tool_response_truncate_side)

    async def _kept(self, image: Any) -> Picture:
        """A tool's picture, with the run's limits of pixels. Raises PictureError for one that cannot be used."""
        assert (processor := self.pictures) is not None
        limits = processor.limited(pixel_limits(self.config.data.mm_processor_kwargs))

        def keep_and_open() -> Picture:
            kept = replace(keep(image), limits=limits)
            processor.text(kept)
            return kept

        return await self.in_tokenizer_thread(keep_and_open)

    async def _reply_tokens(self, replies: Sequence[dict[str, Any]], said: Sequence[int]) -> list[int]:
        shown = self.shown_tools(self.config)
        try:
            return await self.reply_tokens(replies, said, shown)
        except AgentLoopError:
            raise
        except ConfigError as exc:
            raise AgentLoopError(str(exc)) from exc
        except Exception as exc:  # a template raises what it likes, for instance for an empty answer
            if pictures_of(replies):
                raise AgentLoopError(f"the chat template cannot write a tool's answer with a picture: {exc}") from exc
            logger.warning("the chat template cannot write an answer of tools: %s", exc)
        error = "error: the chat template cannot show this answer"
        return await self.reply_tokens([{**reply, "content": error} for reply in replies], said, shown)


def _agent_data(request_id: str, sample: Mapping[str, Any]) -> AgentData:
    tools_kwargs = sample.get("tools_kwargs") or (sample.get("extra_info") or {}).get("tools_kwargs") or {}
    return AgentData(
        request_id=request_id,
        messages=list(sample.get("raw_prompt") or ()),
        tools_kwargs=tools_kwargs,
        pictures=media_in(sample.get(MULTI_MODAL_DATA)),
    )


def _added(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in after.items() if name not in before or before[name] is not value}


def _tools(config: PPOConfig) -> dict[str, BaseTool]:
    path = config.actor_rollout_ref.rollout.multi_turn.tool_config_path
    return load_tools(path) if path else {}
