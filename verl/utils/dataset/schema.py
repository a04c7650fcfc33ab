"""The schema of a row: checks it, and converts it to the form that all readers use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sized
from typing import Any

from verl.utils.dataset.settings import DataSettings

SHOWN_CHARACTERS = 80
NO_MEDIA = "models read text, pictures and videos here; leave it out of the data, with what refers to it"
UNSEEN = (
    "the model reads text alone; give one that sees (of Qwen 3.5, Gemma 3 and 4 and Mistral 3 with "
    "actor_rollout_ref.model.language_model_only=false), or leave it out of the data, with what refers to it"
)
NOTHING = {"image": UNSEEN, "video": UNSEEN}
NO_CHAT = "no list of chat messages {role, content}"


class RowError(ValueError):
    """The row is no sample; the message names the key. The reader of the file adds file and row."""


def sample(row: Mapping[str, Any], config: DataSettings, *, unseen: Mapping[str, str] = NOTHING) -> dict[str, Any]:
    """The row in the form that all readers use. Raises RowError for an invalid row.

    The prompt column holds chat messages without the nulls that parquet puts into fields which only other rows have,
    `reward_model` and `extra_info` are dicts. JSON text in one of the three is parsed. `unseen`: of `image` and `video`
    those that the model does not see, and why; others are left as they are.
    """
    for name, type_ in ((config.image_key, "image"), (config.video_key, "video"), (config.audio_key, "audio")):
        if not is_empty(row.get(name)) and (why := _why_not(type_, unseen)):
            raise RowError(f"{name} is not empty: {why}")
    return {
        **row,
        config.prompt_key: _messages(row.get(config.prompt_key), config.prompt_key, unseen),
        config.reward_fn_key: _name(row.get(config.reward_fn_key), config.reward_fn_key),
        "reward_model": _mapping(row.get("reward_model"), "reward_model", "{style, ground_truth}"),
        "extra_info": _extra_info(row.get("extra_info")),
        **({"agent_name": _agent_name(row["agent_name"])} if "agent_name" in row else {}),
    }


def without_nulls(value: Any) -> Any:
    """`value` without the null fields of dicts, at every level. Nulls in lists stay, because positions matter."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(each) for each in value]
    return value


def is_empty_truth(truth: Any) -> bool:
    """Whether the ground truth is empty, so that no response can be compared with it. 0 and False are not empty."""
    return truth is None or (isinstance(truth, str) and not truth.strip()) or truth in ([], {})


def _messages(prompt: Any, key: str, unseen: Mapping[str, str]) -> list[dict[str, Any]]:
    messages = without_nulls(parsed(prompt))
    if not isinstance(messages, list) or not messages:
        raise RowError(f"{key} is {NO_CHAT}: {_shown(prompt)}")
    for index, message in enumerate(messages):
        _check_message(message, f"{key}[{index}]", unseen)
    if not any(_says_something(message) for message in messages):
        raise RowError(f"{key} is blank: no message has any text")
    return messages


def _check_message(message: Any, key: str, unseen: Mapping[str, str]) -> None:
    if not isinstance(message, dict):
        raise RowError(f"{key} is {_shown(message)}, no chat message {{role, content}}")
    if "role" not in message and "from" in message:
        raise RowError(f"{key} has {sorted(message)}: ShareGPT's {{from, value}} has to become {{role, content}}")
    role = message.get("role")
    if not isinstance(role, str) or not role.strip():
        raise RowError(f"{key}.role is {_shown(role)}, not a name such as 'user'")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return
    if isinstance(content, str):
        _check_text(content, f"{key}.content")
    elif not (isinstance(content, list) and content and all(isinstance(part, dict) and part for part in content)):
        raise RowError(f"{key}.content is {_shown(content)}, neither text nor a list of parts {{type, ...}}")
    else:
        for number, part in enumerate(content):
            if part.get("type") == "text":
                if not isinstance(part.get("text"), str):
                    raise RowError(f"{key}.content[{number}].text is {_shown(part.get('text'))}, not text")
                _check_text(part["text"], f"{key}.content[{number}].text")
            elif why := _why_not(part.get("type"), unseen):
                raise RowError(f"{key}.content[{number}] is of type {_shown(part.get('type'))}: {why}")


def _why_not(type_: Any, unseen: Mapping[str, str]) -> str:
    return unseen.get(type_, "") if isinstance(type_, str) and type_ in NOTHING else NO_MEDIA


def is_empty(value: Any) -> bool:
    """Whether a column with a list or a single value is empty."""
    given = parsed(value)
    return given is None or (isinstance(given, Sized) and not len(given))


def _check_text(text: str, key: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise RowError(f"{key} cannot be written as UTF-8, character {exc.start} is half of a pair") from exc


def _says_something(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        return any(part["type"] != "text" or part["text"].strip() for part in content)
    return bool(message.get("tool_calls")) or bool(str(content).strip())


def _name(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"{key} is {_shown(value)}, not a name")
    return value


def _agent_name(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RowError(f"agent_name is {_shown(value)}, not a name")
    return value


def _extra_info(value: Any) -> dict[str, Any]:
    found = _mapping(value, "extra_info", "a dict")
    for name in ("tools_kwargs", "interaction_kwargs"):
        if name in found:
            found[name] = without_nulls(found[name])
    return found


def _mapping(value: Any, key: str, expected: str) -> dict[str, Any]:
    """A dict of one's own; null is an empty one."""
    found = parsed(value)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise RowError(f"{key} is {_shown(value)}, not {expected}")
    return dict(found)


def parsed(value: Any) -> Any:
    """The value of a JSON text; any other value unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)[:SHOWN_CHARACTERS]
