"""Finds a message's reasoning, in which calls of tools do not count."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USUAL = ("<think>", "</think>")
"""Searched in every message: prompts may teach a policy these marks without a template that has them."""
KNOWN = (
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<|channel>", "<channel|>"),
)
"""Marks of other models: searched if the chat template or the vocabulary has them. gpt-oss's format has its own."""
TAIL = 64
"""Tokens of a prompt's end that are searched: templates may open the reasoning there."""


@dataclass(frozen=True)
class Reasoning:
    """The marks around the reasoning of one model."""

    marks: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Reasoning:
        template: Any = tokenizer.chat_template
        known = {*tokenizer.get_added_vocab()}
        written = "\n".join(template.values()) if isinstance(template, dict) else template or ""
        return cls((USUAL, *(pair for pair in KNOWN if all(mark in known or mark in written for mark in pair))))

    def spans(self, text: str, before: str = "") -> list[tuple[int, int]]:
        """The (start, stop) of each reasoning in `text`, with its marks, in order. An unclosed one extends to the end.

        `before` is the end of the prompt, which may have opened the first reasoning.
        """
        found: list[tuple[int, int]] = []
        close = self._open_at_first(text, before)
        start, inside, close = (0, 0, close) if close else self._next(text, 0)
        while close:
            closed = text.find(close, inside)
            end = closed + len(close) if closed >= 0 else len(text)
            found.append((start, end))
            start, inside, close = self._next(text, end)
        return found

    def _open_at_first(self, text: str, before: str) -> str:
        """The mark that closes the reasoning in which `text` begins; empty: it begins outside."""
        for start, close in self.marks:
            if before.rstrip().endswith(start):
                return close
        ends = [(text.index(close), close) for start, close in self.marks if close in text]
        unopened = [(at, close) for at, close in ends if not any(start in text[:at] for start, _ in self.marks)]
        return min(unopened, default=(0, ""))[1]

    def _next(self, text: str, position: int) -> tuple[int, int, str]:
        """Where the next reasoning begins, what it says, and the mark that closes it; empty if there is none."""
        found = [(text.index(start, position), start, close) for start, close in self.marks if start in text[position:]]
        at, start, close = min(found, default=(0, "", ""))
        return at, at + len(start), close


def outside(
    token_ids: Sequence[int], prompt_ids: Sequence[int], reasoning: Reasoning, decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """The tokens of a message outside of its reasoning, with tokens that are partly in it.

    `decode` returns the exact text of tokens. It is called O(log n) times for each reasoning.
    """
    spans = reasoning.spans(decode(token_ids), decode(prompt_ids[-TAIL:]))
    kept: list[int] = []
    done = 0
    numbers = range(len(token_ids) + 1)
    for start, end in spans:
        kept += token_ids[done : bisect.bisect_left(numbers, start, key=lambda number: len(decode(token_ids[:number])))]
        done = bisect.bisect_right(numbers, end, key=lambda number: len(decode(token_ids[:number]))) - 1
    return [*kept, *token_ids[done:]]
