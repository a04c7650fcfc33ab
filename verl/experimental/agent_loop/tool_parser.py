"""How the calls of tools are found in what a model wrote, under verl's names. `register` adds a format."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel

from verl.experimental.agent_loop.base import tokenizer_thread
from verl.experimental.agent_loop.tools import HERMES, ToolCall, call_of, parse_hermes
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.config import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_KEY = "actor_rollout_ref.rollout.multi_turn.format"
P = TypeVar("P", bound="type[ToolParser]")


class FunctionCall(BaseModel):
    """One call in a model's message."""

    arguments: str
    """A JSON object."""
    name: str
    tool_call_id: str | None = None


class ToolParser(ABC):
    """One for every sample, made from the tokenizer. Its methods run on the event loop of a worker."""

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """What ends a message with calls, beside what ends any message."""
        return []

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[OpenAIFunctionToolSchema] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """The text of a message without its calls, and the calls."""

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: PreTrainedTokenizerBase) -> ToolParser:
        """Raises ConfigError for a name that nobody registered."""
        return cls.parser_class(name)(tokenizer)

    @classmethod
    def parser_class(cls, name: str) -> type[ToolParser]:
        """As `get_tool_parser`, for the driver."""
        if name not in cls._registry:
            raise ConfigError(f"{FORMAT_KEY}={name} is not registered.{did_you_mean(name, cls._registry)}")
        return cls._registry[name]

    @classmethod
    def register(cls, name: str) -> Callable[[P], P]:
        """Class decorator: `multi_turn.format=name` takes this class. In `model.external_lib`, workers know it, too."""

        def add(parser: P) -> P:
            cls._registry[name] = parser
            return parser

        return add

    async def calls(self, responses_ids: Sequence[int], schemas: Sequence[Any]) -> list[ToolCall]:
        """As the tool loop wants them: those that cannot be executed, too, with the reason."""
        tools = [OpenAIFunctionToolSchema.model_validate(schema) for schema in schemas]
        _, found = await self.extract_tool_calls(list(responses_ids), tools)
        return [call_of(one.name, one.arguments) for one in found]


@ToolParser.register("hermes")
class HermesToolParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[OpenAIFunctionToolSchema] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """Calls that cannot be executed are left out."""
        text = await self._text(responses_ids)
        calls = [call for call in parse_hermes(text) if call.error is None]
        return HERMES.sub("", text), [FunctionCall(name=one.name, arguments=json.dumps(one.arguments)) for one in calls]

    async def calls(self, responses_ids: Sequence[int], schemas: Sequence[Any]) -> list[ToolCall]:
        return parse_hermes(await self._text(responses_ids))

    async def _text(self, token_ids: Sequence[int]) -> str:
        # Some vocabularies count <tool_call> among their special tokens.
        decode: Any = partial(self.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text: str = await asyncio.get_running_loop().run_in_executor(tokenizer_thread, decode, token_ids)
        return text
