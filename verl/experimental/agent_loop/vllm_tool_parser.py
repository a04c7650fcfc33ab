"""The formats of tool calls that vLLM reads: `multi_turn.format` takes the names of its `--tool-call-parser`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from verl.experimental.agent_loop.tool_parser import FORMAT_KEY, FunctionCall, ToolParser, in_tokenizer_thread
from verl.experimental.agent_loop.tools import ToolCall
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def vllm_formats() -> list[str]:
    """Empty without vLLM. Imports it, which takes seconds."""
    if importlib.util.find_spec("vllm") is None:
        return []
    from vllm.tool_parsers import ToolParserManager

    return list(ToolParserManager.list_registered())


def parser_of_vllm(name: str) -> type[ToolParser] | None:
    """None for a format that vLLM does not know."""
    if name not in vllm_formats():
        return None
    return type(f"VLLMToolParser_{name}", (VLLMToolParser,), {"format": name})


class VLLMToolParser(ToolParser):
    """vLLM's parser of `format`, as its server uses it. A call that it cannot read is no call.

    Raises ConfigError for a tokenizer without the tokens of the format, and for a package that vLLM misses.
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
        """Raises what vLLM's parser raises."""
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
