"""OpenAI's chat completions, https://platform.openai.com/docs/api-reference/chat: requests and answers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.chat_template import well_formed
from verl.utils.config import did_you_mean

MODEL = "policy"
"""The model's name in answers; requests may name any."""
ROLES = ("system", "developer", "user", "assistant", "tool")
TOO_LONG = "context_length_exceeded"
"""OpenAI's code for a conversation without room for another message."""

READ = ("messages", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options")
OF_THE_RUN = ("model", "temperature", "top_p", "top_k", "seed")
"""Ignored: the run samples all answers in one way, for which the trainer computes log-probs."""
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "verbosity")
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Accepted with these values alone, beside null, which change nothing."""


_TOOLS = TypeAdapter(list[OpenAIFunctionToolSchema])


class Refused(Exception):
    """A request that is not answered. Clients get `status` and the message, in OpenAI's form."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def as_json(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True, slots=True)
class Message:
    """A chat message, in the form in which two of them are compared."""

    role: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments in JSON with sorted keys) of the tool calls."""
    answers: str | None = None
    """The tool whose call this message answers."""

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        written: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.calls:
            functions = [{"name": name, "arguments": _decoded(arguments)} for name, arguments in self.calls]
            written["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        if self.role == "tool":
            written["name"] = self.answers
        return written


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for the next message of a conversation."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    streams: bool = False
    with_usage: bool = False
    """The end of a stream has the numbers of tokens, too."""
    is_retry: bool = False
    """The client got no answer to the same request before."""

    @classmethod
    def of(cls, body: Any, *, is_retry: bool = False) -> Asked:
        """Raises Refused for a body that is no request, and for what is not supported."""
        if not isinstance(body, Mapping):
            raise Refused("the body is no JSON object")
        body = {key: value for key, value in body.items() if value is not None}
        for key, value in body.items():
            if key not in (*READ, *OF_THE_RUN, *WITHOUT_EFFECT) and value not in NEUTRAL.get(key, ()):
                known = (*READ, *OF_THE_RUN, *WITHOUT_EFFECT, *NEUTRAL)
                why = f"with this value ({value!r:.100})" if key in NEUTRAL else f"at all.{did_you_mean(key, known)}"
                raise Refused(f"{key} is not supported {why}")
        tools = body.get("tools", [])
        try:
            _TOOLS.validate_python(tools)
        except ValidationError as exc:
            first = exc.errors()[0]
            where = "".join(f"[{part!r}]" for part in first["loc"])
            raise Refused(f"tools{where}: {first['msg']}") from exc
        return cls(
            messages=_messages(body.get("messages")),
            tools=tuple(tools),
            max_tokens=_positive(body, "max_completion_tokens") or _positive(body, "max_tokens"),
            streams=bool(body.get("stream")),
            with_usage=bool((body.get("stream_options") or {}).get("include_usage")),
            is_retry=is_retry,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """A message of the policy."""

    content: str
    calls: tuple[tuple[str, str, str], ...]
    """(id, name, arguments in JSON)."""
    finish_reason: str
    """stop, tool_calls, or length."""
    num_prompt: int
    num_generated: int
    """Tokens."""

    def as_json(self) -> dict[str, Any]:
        """A `chat.completion`."""
        choice = {"index": 0, "message": self._message(), "finish_reason": self.finish_reason, "logprobs": None}
        return {**_head("chat.completion"), "choices": [choice], "usage": self._usage()}

    def as_chunks(self, *, with_usage: bool) -> list[dict[str, Any]]:
        """`chat.completion.chunk`s: the whole message, then its end."""
        head, message = _head("chat.completion.chunk"), self._message()
        if self.calls:
            numbered = enumerate(message["tool_calls"])
            message["tool_calls"] = [{"index": number, **call} for number, call in numbered]
        choices = [
            {"index": 0, "delta": message, "finish_reason": None},
            {"index": 0, "delta": {}, "finish_reason": self.finish_reason},
        ]
        chunks = [{**head, "choices": [choice]} for choice in choices]
        return [*chunks, {**head, "choices": [], "usage": self._usage()}] if with_usage else chunks

    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for call_id, name, arguments in self.calls
            ]
        return message

    def _usage(self) -> dict[str, int]:
        total = self.num_prompt + self.num_generated
        return {"prompt_tokens": self.num_prompt, "completion_tokens": self.num_generated, "total_tokens": total}


def canonical(arguments: Any) -> str:
    """Arguments of a call, in JSON, with sorted keys; as they are if they are no JSON."""
    try:
        return json.dumps(json.loads(arguments) if isinstance(arguments, str) else arguments, sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return str(arguments)


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise Refused("messages is a list with at least one message")
    tools: dict[str, str] = {}
    found: list[Message] = []
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise Refused(f"{where} has no role of {', '.join(ROLES)}")
        calls = _calls(message.get("tool_calls"), where)
        tools |= {call_id: name for call_id, name, _ in calls}
        answers = None
        if message["role"] == "tool" and (answers := tools.get(str(message.get("tool_call_id")))) is None:
            call_id = message.get("tool_call_id")
            raise Refused(f"{where} answers {call_id!r}, which is the id of no call before it")
        found.append(
            Message(
                role="system" if message["role"] == "developer" else message["role"],
                content=well_formed(_text(message.get("content"), where)),
                calls=tuple((name, arguments) for _, name, arguments in calls),
                answers=answers,
            )
        )
    return tuple(found)


def _calls(given: Any, where: str) -> list[tuple[str, str, str]]:
    calls = given or []
    if not isinstance(calls, list) or not all(
        isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls
    ):
        raise Refused(f'{where}.tool_calls is a list of {{"id": ..., "type": "function", "function": {{...}}}}')
    return [
        (str(call.get("id")), str(call["function"].get("name")), canonical(call["function"].get("arguments")))
        for call in calls
    ]


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Refused(f"{where} has a part of type {kind!r}, and only text is supported")
    return "\n".join(part["text"] for part in parts)


def _positive(body: Mapping[str, Any], key: str) -> int | None:
    value = body.get(key)
    if value is not None and (not isinstance(value, int) or value < 1):
        raise Refused(f"{key}={value!r} is not a positive number of tokens")
    return value


def _decoded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": MODEL}
