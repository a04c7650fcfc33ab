"""The conversation of one sample's agent: its messages, and the tokens that the policy read and wrote.

A request goes on with a conversation if it begins with all its messages. Then the tokens so far stay as they were
sampled, and only the new messages become tokens: nothing is decoded and encoded again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.base import AgentLoopBase, fit_prompt
from verl.experimental.agent_loop.errors import AgentLoopError, PromptTooLong
from verl.experimental.agent_loop.openai_wire import TOO_LONG, Answer, Asked, Message, Refused, canonical
from verl.experimental.agent_loop.output import Response
from verl.experimental.agent_loop.thinking import Reasoning, outside
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.config import ConfigError
from verl.workers.rollout.records import SamplingOptions, StopReason, TokenOutput


@dataclass(eq=False)
class Conversation:
    """Messages, each of which follows the others, and their tokens."""

    asked: Asked
    """The first request."""
    prompt_ids: list[int]
    response: Response
    messages: list[Message]
    without_reasoning: dict[int, str] = field(default_factory=dict)
    """Messages of the policy, by their place: agents may send back what is outside of their reasoning."""
    request_id: str = field(default_factory=lambda: uuid4().hex)
    said: Sequence[int] = ()
    """Tokens of the policy's last message."""
    answer: Answer | None = None
    """The last one."""
    num_turns: int = 1
    stop_reason: StopReason = "length"
    is_answered: bool = False
    """Whether the last message is the policy's; a client may have gone before it had its answer."""
    under_way: asyncio.Task[Any] | None = None
    """The request that waits for an answer."""

    def has_begun(self, asked: Asked) -> bool:
        """Whether `asked` adds messages of others to the last answer, or asks once more for one that nobody got."""
        more = asked.messages[len(self.messages) :]
        return (
            self.under_way is None
            and self.asked.tools == asked.tools
            and self._are_mine(asked.messages[: len(self.messages)])
            and bool(more) == self.is_answered
            and all(message.role != "assistant" for message in more)
        )

    def is_before(self, asked: Asked) -> bool:
        """Whether `asked` may follow the request under way, or repeat it because its client has gone."""
        mine = self._are_mine(asked.messages[: len(self.messages)])
        return self.asked.tools == asked.tools and mine

    def has_answered(self, asked: Asked) -> bool:
        """Whether the last answer is one to `asked`."""
        all_but_the_answer = len(asked.messages) == len(self.messages) - 1
        return all_but_the_answer and self.asked.tools == asked.tools and self._are_mine(asked.messages)

    def unlike(self, asked: Asked) -> str:
        """Why `asked` does not follow."""
        if self.asked.tools != asked.tools:
            return "it has other tools"
        if self.under_way is not None or not self.is_answered:
            return "the first one waits for an answer"
        for number, message in enumerate(self.messages):
            if number >= len(asked.messages):
                return f"messages[{number}] of the first one is missing"
            if not self._is_mine(number, asked.messages[number]):
                return f"messages[{number}] of role {message.role} is another one"
        return "it adds no message, or one of role assistant"

    def _are_mine(self, given: Sequence[Message]) -> bool:
        return len(given) <= len(self.messages) and all(
            self._is_mine(number, message) for number, message in enumerate(given)
        )

    def _is_mine(self, number: int, given: Message) -> bool:
        known, shorter = self.messages[number], self.without_reasoning.get(number)
        if shorter is None:
            return given == known
        texts = (known.content.strip(), shorter.strip())
        return (given.role, given.calls) == (known.role, known.calls) and given.content.strip() in texts


class Session:
    """Answers the requests of one sample's agent. Used on the event loop of its worker."""

    def __init__(self, loop: AgentLoopBase, sampling: SamplingOptions, *, last_alone: bool) -> None:
        """`loop` has tokenizer, configuration and servers. With `last_alone` an agent may begin several conversations,
        and the last one is trained on; without, a second one is refused."""
        self._loop = loop
        self._sampling = sampling
        self._last_alone = last_alone
        self._multi_turn = loop.config.actor_rollout_ref.rollout.multi_turn
        self._parser = ToolParser.get_tool_parser(self._multi_turn.format, loop.tokenizer)
        self._reasoning = Reasoning.of(loop.tokenizer)
        self._conversations: list[Conversation] = []
        self.last: Conversation | None = None
        """The conversation of the last answer."""
        self.generate_s = 0.0
        self.num_calls = 0
        self.fault: Exception | None = None
        """Ends the run, whatever the agent makes of it."""
        self.is_full = False
        """The agent was told that there is no room for another message."""
        self.requests: set[asyncio.Task[Any]] = set()
        """Under way."""

    def begun(self, prompt_ids: list[int], asked: Asked | None = None) -> Conversation:
        """One without a message of the policy."""
        response = Response(self._sampling.max_tokens, with_log_probs=self._sampling.logprobs)
        asked = asked or Asked(())
        return Conversation(asked, prompt_ids, response, list(asked.messages))

    async def answer(self, asked: Asked) -> Answer:
        """The policy's next message. Raises Refused; errors that are not the agent's are in `fault`, too."""
        try:
            return await self._answer(asked)
        except Refused:
            raise
        except Exception as exc:
            self.fault = self.fault or exc
            raise Refused(str(exc), status=500) from exc

    async def _answer(self, asked: Asked) -> Answer:
        for one in self._conversations:
            if one.under_way is not None and one.is_before(asked):
                await asyncio.wait([one.under_way])
        if asked.is_retry and self.last is not None and self.last.answer is not None and self.last.has_answered(asked):
            return self.last.answer
        conversation = next((one for one in self._conversations if one.has_begun(asked)), None)
        if conversation is None:
            conversation = await self._begin(asked)
        conversation.under_way = asyncio.current_task()
        try:
            await self._add(conversation, asked.messages[len(conversation.messages) :])
            return await self._next(conversation, asked.max_tokens)
        finally:
            conversation.under_way = None

    async def _begin(self, asked: Asked) -> Conversation:
        if self._conversations and not self._last_alone:
            raise AgentLoopError(
                f"the agent began a second conversation ({self._conversations[0].unlike(asked)}), and a sample trains "
                "on one: send back every message as it was, or set conversations: last in the entry of "
                "agent_loop_config_path to train on the last one alone"
            )
        data = self._loop.config.data
        messages = [message.for_template() for message in asked.messages]
        token_ids = await self._written(self._loop.apply_chat_template(messages, asked.tools))
        try:
            prompt_ids = fit_prompt(token_ids, data.max_prompt_length, data.truncation)
        except PromptTooLong as exc:
            self.fault = self.fault or exc
            raise Refused(str(exc), code=TOO_LONG) from exc
        conversation = self.begun(prompt_ids, asked)
        self._conversations.append(conversation)
        return conversation

    async def _add(self, conversation: Conversation, more: Sequence[Message]) -> None:
        """The messages of others."""
        if not more:
            return
        replies = [message.for_template() for message in more]
        token_ids = await self._written(self._loop.reply_tokens(replies, conversation.said, conversation.asked.tools))
        response = conversation.response
        if len(token_ids) >= response.room:
            self.is_full = True
            raise Refused(
                f"{len(more)} more messages ({len(token_ids)} tokens) leave no room for an answer: "
                f"{len(response.token_ids)} of data.max_response_length={response.limit} tokens are used",
                code=TOO_LONG,
            )
        response.add_inserted(token_ids)
        conversation.messages += more
        conversation.is_answered = False
        conversation.num_turns += 1

    async def _written(self, tokens: Any) -> list[int]:
        """Of messages. Raises Refused for those that the chat template refuses: it raises what it likes."""
        try:
            found: list[int] = await tokens
        except (AgentLoopError, ConfigError):
            raise
        except Exception as exc:
            raise Refused(f"the chat template cannot write these messages: {exc}") from exc
        return found

    async def _next(self, conversation: Conversation, max_tokens: int | None) -> Answer:
        response, tools = conversation.response, conversation.asked.tools
        context = [*conversation.prompt_ids, *response.token_ids]
        ends = () if self._sampling.ignore_eos else (await self._loop.turns(tools)).stop_token_ids
        ends = (*self._sampling.stop_token_ids, *ends, *(self._parser.stop_token_ids if tools else ()))
        room = min(response.room, max_tokens or response.room)
        started = time.monotonic()
        self.num_calls += 1
        output = await self._loop.server_manager.generate(
            conversation.request_id,
            prompt_ids=context,
            sampling_params=replace(self._sampling, max_tokens=room, stop_token_ids=ends),
        )
        self.generate_s += time.monotonic() - started
        content, calls = await self._read(output, context, tools)
        answer = Answer(
            content=content,
            calls=tuple((f"call_{uuid4().hex[:24]}", call.name, call.arguments) for call in calls),
            finish_reason="length" if output.stop_reason != "completed" else "tool_calls" if calls else "stop",
            num_prompt=len(context),
            num_generated=len(output.token_ids),
        )
        response.add_generated(output)
        conversation.without_reasoning[len(conversation.messages)] = self._without_reasoning(content)
        asked_for = tuple((call.name, canonical(call.arguments)) for call in calls)
        conversation.messages.append(Message("assistant", content, asked_for))
        conversation.said, conversation.answer, conversation.is_answered = output.token_ids, answer, True
        conversation.num_turns += 1
        conversation.stop_reason = output.stop_reason
        self.last = conversation
        return answer

    async def _read(
        self, output: TokenOutput, context: Sequence[int], tools: Sequence[Any]
    ) -> tuple[str, list[FunctionCall]]:
        """The text of a message, and its calls if there are tools."""
        said = output.token_ids
        added: Any = self._loop.tokenizer.added_tokens_decoder
        last = added.get(said[-1]) if said else None
        if last is not None and last.special:
            said = said[:-1]
        if tools:
            heard = said
            if self._multi_turn.ignore_calls_in_thinking:
                decode = self._loop.decoded
                heard = await self._loop.in_tokenizer_thread(lambda: outside(said, context, self._reasoning, decode))
            schemas = [OpenAIFunctionToolSchema.model_validate(tool) for tool in tools]
            content, calls = await self._parser.extract_tool_calls(list(heard), schemas)
            if calls:
                return content, calls
        return await self._loop.text(said, keep_special_tokens=True), []

    def _without_reasoning(self, text: str) -> str:
        kept, done = "", 0
        for start, end in self._reasoning.spans(text):
            kept, done = kept + text[done:start], end
        return kept + text[done:]
