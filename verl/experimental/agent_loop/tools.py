"""Tools that a model may call, and how calls are written in its text."""

from __future__ import annotations

import inspect
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from verl.utils.config import ConfigError
from verl.utils.pictures import Medium, Picture

if TYPE_CHECKING:
    from PIL import Image

MOST_DIGITS = 1000
"""The most digits of an integer in a call. Python does not convert integers of more than 4,300 digits to text."""


@dataclass(slots=True)
class AgentData:
    """The sample for which a tool is called, with its pictures, and the rewards that tools gave."""

    request_id: str = ""
    messages: list[Any] = field(default_factory=list)
    """The messages of the prompt."""
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The sample's `extra_info.tools_kwargs`: the arguments of `create` by tool."""
    tool_rewards: list[float] = field(default_factory=list)
    """The rewards of calls, in the order in which the calls ended."""
    reward_scores: dict[str, float] = field(default_factory=dict)
    """The last result of `calc_reward` by tool."""
    extra_fields: dict[str, Any] = field(default_factory=dict)
    pictures: list[Medium] = field(default_factory=list)
    """Those of the prompt, with its videos, and of answers since."""
    idempotency_key: str = ""
    """Of the call for which a tool gets this: see `BaseTool.execute`."""

    def for_call(self, key: str) -> AgentData:
        """What one call gets: what it adds here is not there yet for those beside it."""
        own = {name: copy(getattr(self, name)) for name in ("tool_rewards", "reward_scores", "extra_fields")}
        return replace(self, idempotency_key=key, **own)

    @property
    def image_data(self) -> list[Image.Image]:
        """verl's name: the pictures, opened, RGB. Raises PictureError for a file that has changed."""
        return [picture.open() for picture in self.pictures if isinstance(picture, Picture)]


class BaseTool(ABC):
    """One tool, shared by all samples of a worker process: `execute` must keep a call's state in local variables.

    The chat template shows `schema` to the model: `{"type": "function", "function": {"name": ..., "description": ...,
    "parameters": <JSON schema>}}`.
    """

    schema: Mapping[str, Any]
    """The schema: a class attribute, or the entry's `tool_schema` in the YAML file."""
    default_config: ClassVar[Mapping[str, Any]] = {}
    idempotent = False
    """Whether a call may be executed twice: a class attribute, or the entry's `idempotent`. Without it, one that had
    begun in a process that died is not repeated: see `outcome`."""

    def __init__(self, config: Mapping[str, Any] | None = None, schema: Mapping[str, Any] | None = None) -> None:
        """`config` is the entry's `config`. Raises ConfigError without a usable schema."""
        self.config = {**self.default_config, **(config or {})}
        if schema is not None:
            self.schema = schema
        found = getattr(self, "schema", None)
        function = found.get("function") if isinstance(found, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigError(f'tool {type(self).__name__}: its schema lacks {{"function": {{"name": ...}}}}')

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    @abstractmethod
    async def execute(self, arguments: dict[str, Any]) -> Any:
        """Execute a call; returns text for the model, a `ToolResponse`, or a value that `answer_text` converts.

        Runs on the thread of the tools; a blocking tool delays other tools until its deadline. The model gets an
        exception as an error text.

        If it has an argument `idempotency_key`, it gets the call's: 32 hexadecimal digits, the same if the call is
        repeated. A service that knows the header `Idempotency-Key` then executes it once.
        """

    async def outcome(self, arguments: dict[str, Any], idempotency_key: str) -> Any:
        """As `execute`, for a call that had begun in a process that died, and may have been executed.

        A tool whose service tells by a key what became of a call asks it here, and may wait. It must not execute
        anything: it is repeated if its process dies, too.
        """
        return f"error: {self.name} was interrupted; it may have been executed, and is not repeated"

    async def answer(self, arguments: dict[str, Any], agent_data: AgentData) -> Any:
        """The result of `execute`. Tools written for verl also use `agent_data`."""
        keyed = "idempotency_key" in inspect.signature(self.execute).parameters
        more = {"idempotency_key": agent_data.idempotency_key} if keyed else {}
        answer = self.execute(arguments, **more)
        return await answer if inspect.isawaitable(answer) else answer

    async def outcome_of(self, arguments: dict[str, Any], agent_data: AgentData) -> Any:
        """The result of `outcome`."""
        answer = self.outcome(arguments, agent_data.idempotency_key)
        return await answer if inspect.isawaitable(answer) else answer


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call in a model's message. `error` says why it cannot be executed; then the name may be empty."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


HERMES = re.compile(r"<tool_call>(.*?)(?:(</tool_call>)|\Z)", re.DOTALL)
DEEPEST = 64
"""The most nested lists and objects in a call: deeper ones could not be serialised or compared."""


def parse_hermes(text: str) -> list[ToolCall]:
    """The calls `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in `text`, with malformed ones.

    Accepts any text; a call that cannot be executed has an `error`. Time and memory are linear in the text.
    """
    return [_parse_call(body, closed=bool(end)) for body, end in HERMES.findall(text)]


def call_of(name: str, arguments: str) -> ToolCall:
    """The call with these arguments in JSON; has an `error` if they are not."""
    try:
        return _checked({"name": name, "arguments": _decoded(arguments)})
    except (ValueError, RecursionError) as exc:
        return ToolCall(name, {}, f"the arguments of {name} are not valid JSON: {_why(exc)}")


def _parse_call(body: str, *, closed: bool) -> ToolCall:
    if not closed:
        return ToolCall("", {}, "the tool call is not closed with </tool_call>")
    try:
        return _checked(_decoded(body))
    except (ValueError, RecursionError) as exc:
        return ToolCall("", {}, f"the tool call is not valid JSON: {_why(exc)}")


def _decoded(text: str) -> Any:
    """Raises ValueError, RecursionError."""
    value = _JSON.decode(text)
    _check_content(value)
    return value


def _checked(call: Any) -> ToolCall:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, 'a tool call is {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], {}, f"the arguments of {call['name']} are not a JSON object")
    return ToolCall(call["name"], arguments)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r} is there twice")
        found[name] = value
    return found


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _float(text: str) -> float:
    number = float(text) if len(text) <= MOST_DIGITS else math.inf
    if not math.isfinite(number):
        raise ValueError("a number is too large or too long")
    return number


def _int(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"an integer has more than {MOST_DIGITS} digits")
    return int(text)


_JSON = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_int)


def _check_content(call: Any) -> None:
    """Raises ValueError for what a tool could stumble over: levels beyond `DEEPEST`, texts that are no Unicode."""
    level = [call]
    for _ in range(DEEPEST):
        for value in level:
            if isinstance(value, str):
                value.encode()
        containers = [value for value in level if isinstance(value, (dict, list))]
        level = [
            each for value in containers for each in (*value, *(value.values() if isinstance(value, dict) else ()))
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def _why(exc: Exception) -> str:
    if isinstance(exc, RecursionError):
        return f"it is nested more than {DEEPEST} levels deep"
    if isinstance(exc, UnicodeEncodeError):
        return "half of a surrogate pair is no character"
    return str(exc)
