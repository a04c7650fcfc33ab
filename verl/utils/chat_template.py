"""The token ids that a chat template puts between two messages of the policy."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from verl.utils.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_KEPT = 16


@dataclass(frozen=True)
class _Shape:
    """How a conversation with answers of tools has to look for a template to write it."""

    with_calls: bool
    """The message before the answers has `tool_calls`."""
    joined: bool
    """All answers are in one message."""


PLAIN = _Shape(with_calls=False, joined=False)
SHAPES = (PLAIN, _Shape(True, False), _Shape(False, True), _Shape(True, True))


def _message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


OPENINGS = ([_message("user", "x")], [_message("system", "x"), _message("user", "x")])
"""First messages of test conversations: some templates refuse an empty message, some require one of the system."""


class Turns:
    """The template of one tokenizer, with the tools and arguments of the prompts.

    Use it on the tokenizer's thread.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any] | None, arguments: Mapping[str, Any]
    ) -> None:
        """`arguments` are for `apply_chat_template`."""
        self._tokenizer: Any = tokenizer
        self._tools = list(tools) if tools else None
        self._arguments = dict(arguments)
        self._tool_shape: _Shape | None = None
        added: Mapping[int, Any] = self._tokenizer.added_tokens_decoder
        special = {number for number, token in added.items() if token.special} | {*self._tokenizer.all_special_ids}
        texts = sorted(filter(None, self._tokenizer.convert_ids_to_tokens(sorted(special))), key=len, reverse=True)
        self._special_texts = re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")
        self._opening = self._accepted_opening()
        self._end = self._end_of_message()
        end_ids = self._ids(self._end)
        self._end_width = max(1, len(end_ids))
        self._own_ends = [number for number in end_ids if number in added or number in special]
        self._ends = {self._tokenizer.eos_token_id, *self._own_ends}
        self._may_end = special | self._ends

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token that ends a message in this template; empty if none does."""
        return tuple(self._own_ends[:1])

    def between(
        self,
        replies: Sequence[Mapping[str, Any]],
        said: Sequence[int],
        expand: Callable[[str], str] | None = None,
    ) -> list[int]:
        """The token ids between the policy's message `said` and its next one, with the messages `replies` of others.

        Includes the end of `said`, unless the policy has written an end, even another than the template's. Special
        tokens in the text of replies become ordinary ones. `expand` puts what pictures become in the place of what the
        template writes for them, parts {type: image}. Raises ConfigError for answers of tools, or pictures, in a
        template that does not show them, and the template's errors.
        """
        shape = self._shape_for_tools() if any(reply["role"] == "tool" for reply in replies) else PLAIN
        mark = uuid4().hex  # nobody can have written it
        found: list[str] = []

        def marked(match: re.Match[str]) -> str:
            found.append(match[0])
            return f"{mark}n{len(found) - 1}n"

        def plain(value: Any) -> Any:
            if isinstance(value, str):
                return self._special_texts.sub(marked, value)
            return [{**part, "text": plain(part["text"])} if "text" in part else part for part in value]

        whole = self._written(shape, [{name: plain(value) for name, value in reply.items()} for reply in replies])
        if expand is not None:
            self._require_parts(shape, replies)
            whole = expand(whole)
        pieces = re.split(f"{mark}n([0-9]+)n", whole)
        as_text = {text: self._ids(text, split_special_tokens=True) for text in set(found)}
        token_ids: list[int] = []
        for index, piece in enumerate(pieces):
            token_ids += as_text[found[int(piece)]] if index % 2 else self._ids(piece)
        return self._behind_end(token_ids, said[-1]) if said and said[-1] in self._may_end else token_ids

    def require_tool_answers(self) -> None:
        """Raises ConfigError unless the template shows answers of tools."""
        self._shape_for_tools()

    def _require_parts(self, shape: _Shape, replies: Sequence[Mapping[str, Any]]) -> None:
        """Raises ConfigError unless the template writes the text beside a picture, too."""
        for role in sorted({reply["role"] for reply in replies if not isinstance(reply["content"], str)}):
            mark = uuid4().hex
            parts = [{"type": "image"}, {"type": "text", "text": mark}]
            if mark not in self._written(shape, [{"role": role, "content": parts, "name": role}]):
                raise ConfigError(
                    f"the tokenizer's chat template does not show the text beside a picture in messages of role "
                    f"{role!r}; set actor_rollout_ref.model.custom_chat_template to one that does"
                )

    def _behind_end(self, token_ids: list[int], written: int) -> list[int]:
        """`token_ids` without the template's end of a message, which the policy has ended with the token `written`."""
        for index, number in enumerate(token_ids[: self._end_width]):
            if number in self._ends or number == written:
                return token_ids[index + 1 :]
        return token_ids

    def _accepted_opening(self) -> list[dict[str, Any]]:
        for opening in OPENINGS:
            try:
                self._rendered(opening)
            except Exception:  # noqa: BLE001 - a template raises what it likes; there is another one
                continue
            return opening
        return OPENINGS[0]

    def _end_of_message(self) -> str:
        """What the template writes behind a message of the policy, whatever follows."""
        mark = uuid4().hex
        said = [*self._opening, _message("assistant", mark)]
        try:
            alone = self._rendered(said, opened=False).rpartition(mark)
            answered = self._rendered([*said, OPENINGS[0][0]]).rpartition(mark)
        except Exception:  # noqa: BLE001 - a template raises what it likes; it may want no such conversation
            return ""
        return self._common(alone[2], answered[2]) if alone[1] and answered[1] else ""

    def _common(self, one: str, other: str) -> str:
        """What both begin with, in whole special tokens: `<|return|>` and `<|end|>` have nothing in common."""
        common = os.path.commonprefix([one, other])
        starts = (
            match.start()
            for text in (one, other)
            for match in self._special_texts.finditer(text)
            if match.start() < len(common) < match.end()
        )
        return common[: min(starts, default=len(common))]

    def _shape_for_tools(self) -> _Shape:
        """The first in which two answers are shown."""
        if self._tool_shape is None:
            answers = [f"answer{uuid4().hex}" for _ in range(2)]
            why = ""
            for shape in SHAPES:
                try:
                    written = self._written(shape, [_message("tool", answer, name="tool") for answer in answers])
                except Exception as exc:  # noqa: BLE001 - a template raises what it likes; there are other shapes
                    why = f" (it says: {exc})"
                    continue
                if all(answer in written for answer in answers):
                    self._tool_shape = shape
                    break
            else:
                raise ConfigError(
                    f"the tokenizer's chat template does not show messages of role 'tool'{why}; "
                    "set actor_rollout_ref.model.custom_chat_template to one that does"
                )
        return self._tool_shape

    def _written(self, shape: _Shape, replies: Sequence[Mapping[str, Any]]) -> str:
        """Behind the text of the policy's message, in this shape; empty if that message is not shown."""
        if shape.joined:
            replies = [{**replies[0], "content": _joined([reply["content"] for reply in replies])}]
        numbered = [
            {**reply, "tool_call_id": _call_id(number)} if reply["role"] == "tool" else reply
            for number, reply in enumerate(replies)
        ]
        if not shape.with_calls:
            mark = uuid4().hex
            whole = self._rendered([*self._opening, _message("assistant", mark), *numbered])
            return whole.rpartition(mark)[2] if mark in whole else ""
        calls = [
            {"id": reply["tool_call_id"], "type": "function", "function": {"name": reply["name"], "arguments": {}}}
            for reply in numbered
        ]
        called = [*self._opening, _message("assistant", "", tool_calls=calls)]
        before, whole = self._rendered(called, opened=False), self._rendered([*called, *numbered])
        return self._end + whole[len(before) :] if whole.startswith(before) else ""

    def _rendered(self, messages: Sequence[Mapping[str, Any]], *, opened: bool = True) -> str:
        """`opened`: up to where the policy's next message begins."""
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tools=self._tools, add_generation_prompt=opened, tokenize=False, **self._arguments
        )
        return text

    def _ids(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        if not text:
            return []
        ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=split_special_tokens
        )
        return ids


def _joined(contents: Sequence[Any]) -> Any:
    """A text, or a list of parts where one of them is one, with a line for each."""
    if all(isinstance(content, str) for content in contents):
        return "\n".join(contents)
    found: list[Any] = []
    for content in contents:
        found += [{"type": "text", "text": "\n"}] if found else []
        found += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return found


_known: dict[tuple[Any, ...], Turns] = {}


def turns_of(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any] | None, arguments: Mapping[str, Any]) -> Turns:
    """The `Turns` of a tokenizer, cached by tokenizer, template, tools and arguments."""
    key = (id(tokenizer), len(tokenizer), tokenizer.eos_token, repr((tokenizer.chat_template, tools, arguments)))
    if key not in _known:
        while len(_known) >= MOST_KEPT:
            del _known[next(iter(_known))]
        _known[key] = Turns(tokenizer, tools, arguments)
    return _known[key]


def well_formed(text: str) -> str:
    """`text` in a form that tokenizers accept: surrogate pairs are joined, single surrogates replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _call_id(number: int) -> str:
    """Nine letters and digits, which is what Mistral's templates ask for."""
    return f"call{number:05d}"
