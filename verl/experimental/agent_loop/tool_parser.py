"""Parsers of tool calls in a model's messages, under verl's names. `register` adds a format.

For other formats, `multi_turn.format` accepts the names of vLLM's `--tool-call-parser`."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
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

OF_VERL = {"glm": "glm45", "kimi": "kimi_k2", "minimax": "minimax_m2", "seed": "seed_oss"}
"""Formats that have other names in verl than in vLLM."""
FORMAT_KEY = "actor_rollout_ref.rollout.multi_turn.format"
P = TypeVar("P", bound="type[ToolParser]")


class FunctionCall(BaseModel):
    """One call in a model's message."""

    arguments: str
    """A JSON object."""
    name: str
    tool_call_id: str | None = None


class ToolParser(ABC):
    """Finds the calls of one sample. Made from the tokenizer; its methods run on a worker's event loop."""

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """Further tokens that end a message with calls."""
        return []

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[OpenAIFunctionToolSchema] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """The text of a message without its calls, and the calls."""

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: PreTrainedTokenizerBase) -> ToolParser:
        """The parser of a registered format. Raises ConfigError for any other name."""
        return cls.parser_class(name)(tokenizer)

    @classmethod
    def parser_class(cls, name: str) -> type[ToolParser]:
        """Check the name on the driver, as `get_tool_parser`. An unregistered name may be one of vLLM's formats."""
        if name in cls._registry:
            return cls._registry[name]
        if parser := parser_of_vllm(name):
            return parser
        known = [*cls._registry, *vllm_formats()]
        raise ConfigError(f"{FORMAT_KEY}={name} is not registered.{did_you_mean(name, known)}")

    @classmethod
    def register(cls, name: str) -> Callable[[P], P]:
        """Class decorator: `multi_turn.format=name` selects this class; for workers, use it in `model.external_lib`."""

        def add(parser: P) -> P:
            cls._registry[name] = parser
            return parser

        return add

    async def text(self, responses_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode on the tokenizer's thread, with special tokens: in some vocabularies a call's marks are special."""
        decoded: str = await in_tokenizer_thread(
            self.tokenizer.decode,
            responses_ids,
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return decoded

    async def calls(self, responses_ids: Sequence[int], schemas: Sequence[Any]) -> list[ToolCall]:
        """All calls for the tool loop; those that cannot be executed have an `error`."""
        tools = [OpenAIFunctionToolSchema.model_validate(schema) for schema in schemas]
        _, found = await self.extract_tool_calls(list(responses_ids), tools)
        return [call_of(one.name, one.arguments) for one in found]


async def in_tokenizer_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(tokenizer_thread, partial(function, *args, **kwargs))


@ToolParser.register("hermes")
class HermesToolParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[OpenAIFunctionToolSchema] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """As for the base class; omits calls that cannot be executed."""
        text = await self.text(responses_ids)
        calls = [call for call in parse_hermes(text) if call.error is None]
        return HERMES.sub("", text), [FunctionCall(name=one.name, arguments=json.dumps(one.arguments)) for one in calls]

    async def calls(self, responses_ids: Sequence[int], schemas: Sequence[Any]) -> list[ToolCall]:
        return parse_hermes(await self.text(responses_ids))


@ToolParser.register("gpt-oss")
class GptOssToolParser(ToolParser):
    """`<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`

    The format of OpenAI's gpt-oss models, https://cookbook.openai.com/articles/openai-harmony. The prompt ends behind
    the first `<|start|>assistant`. Thoughts are messages without a recipient, and no calls.
    """

    MESSAGE = re.compile(
        r"(?:\A|<\|start\|>)(?P<header>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>"
        r"(?P<body>.*?)(?P<end><\|(?:call|end|return)\|>|\Z)",
        re.DOTALL,
    )
    RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")

    @property
    def stop_token_ids(self) -> list[int]:
        number = self.tokenizer.get_added_vocab().get("<|call|>")
        return [] if number is None else [number]

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[OpenAIFunctionToolSchema] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """As for the base class; arguments may be invalid JSON."""
        text = await self.text(responses_ids)
        calls: list[FunctionCall] = []
        rest, done = "", 0
        for message in self.MESSAGE.finditer(text):
            if recipient := self.RECIPIENT.search(message["header"]):
                calls.append(FunctionCall(name=recipient[1], arguments=message["body"]))
                rest, done = rest + text[done : message.start()], message.end()
        return rest + text[done:], calls


def vllm_formats() -> list[str]:
    """The names of vLLM's formats; empty without vLLM. Imports vLLM, which takes seconds."""
    if importlib.util.find_spec("vllm") is None:
        return []
    from vllm.tool_parsers import ToolParserManager

    return list(ToolParserManager.list_registered())


def parser_of_vllm(name: str) -> type[ToolParser] | None:
    """vLLM's parser of a format, by vLLM's or verl's name; None for an unknown one."""
    name = OF_VERL.get(name, name)
    if name not in vllm_formats():
        return None
    return type(f"VLLMToolParser_{name}", (VLLMToolParser,), {"format": name})


class VLLMToolParser(ToolParser):
    """vLLM's parser of `format`, as in its server. Calls that it cannot parse remain text.

    Raises ConfigError for a tokenizer without the format's tokens, and for a package that vLLM lacks.
    """

    format: ClassVar[str]

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        plain: Any = tokenizer
        try:
            from vllm.tokenizers.hf import get_cached_tokenizer
            from vllm.tool_parsers import ToolParserManager

            self._parser_class: Any = ToolParserManager.get_tool_parser(self.format)
            self._cached = get_cached_tokenizer(plain)
            self._extracted([], [])
        except Exception as exc:
            raise ConfigError(f"{FORMAT_KEY}={self.format} cannot be read with this tokenizer: {exc}") from exc

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[OpenAIFunctionToolSchema] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """As for the base class. Raises the errors of vLLM's parser."""
        schemas = [tool.model_dump(exclude_none=True) for tool in tools or ()]
        found = await in_tokenizer_thread(self._extracted, responses_ids, schemas)
        calls = [FunctionCall(name=one.function.name, arguments=one.function.arguments) for one in found.tool_calls]
        return found.content or "", calls

    async def calls(self, responses_ids: Sequence[int], schemas: Sequence[Any]) -> list[ToolCall]:
        try:
            return await super().calls(responses_ids, schemas)
        except Exception as exc:  # noqa: BLE001 - a parser meets whatever a model writes; the sample goes on
            return [ToolCall("", {}, f"this is no message with calls in the format {self.format}: {exc}")]

    def _extracted(self, responses_ids: Sequence[int], schemas: Sequence[Any]) -> Any:
        """vLLM's ExtractedToolCallInformation. Parsers hold what they have read: one for every message."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        asked = ChatCompletionRequest(model="", messages=[], tools=list(schemas) or None)
        parser = self._parser_class(self._cached, asked.tools)
        asked = parser.adjust_request(asked)
        text = self.tokenizer.decode(
            self._without_end(responses_ids),
            skip_special_tokens=asked.skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return parser.extract_tool_calls(text, asked)

    def _without_end(self, token_ids: Sequence[int]) -> list[int]:
        """vLLM's server does not show its parsers the token that ends a message."""
        last = self.tokenizer.added_tokens_decoder.get(token_ids[-1]) if token_ids else None
        return list(token_ids[:-1] if last is not None and last.special else token_ids)
