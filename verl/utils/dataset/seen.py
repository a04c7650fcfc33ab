"""Finds a prompt's pictures: marks in messages, or parts of messages, and the column with the pictures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl.utils.dataset.schema import RowError, is_empty, parsed
from verl.utils.pictures import Picture, PictureError, PixelLimits, keep

NO_LIMITS = PixelLimits()
MARK, OTHER_MARKS = "<image>", ("<video>", "<audio>")


def with_pictures(
    messages: Sequence[Mapping[str, Any]],
    column: Any,
    *,
    prompt_key: str,
    image_key: str,
    has_column: bool,
    limits: PixelLimits = NO_LIMITS,
) -> tuple[list[dict[str, Any]], list[Picture]]:
    """The messages with each picture as a separate part {type, image}, and the pictures in their order.

    `column` has one picture for each `<image>` in a text, and for each part of type image without its own. If there are
    any, every text becomes a list of parts, as in verl. With `has_column`, the files have the column, so a mark without
    a picture is a mistake. The pictures get `limits`.

    Raises RowError for different numbers of marks and pictures, and for a picture that cannot be kept.
    """
    given = _listed(column)
    parts_have_some = any(part["type"] == "image" for message in messages for part in _parts(message))
    marks = sum(_text_of(message).count(MARK) for message in messages)
    if not given and not parts_have_some and not (marks and has_column):
        return [dict(message) for message in messages], []
    split = [_split(message, marks_stand_for_some=has_column) for message in messages]
    wanted = sum(part["type"] == "image" and _is_open(part) for message in split for part in _parts(message))
    if wanted != len(given):
        raise RowError(f"{prompt_key} has {wanted} places for pictures, and {image_key} has {len(given)}")
    rest = iter(enumerate(given))
    found: list[Picture] = []

    def filled(part: Mapping[str, Any]) -> dict[str, Any]:
        if part["type"] != "image":
            return dict(part)
        place = f"the picture in {prompt_key}"
        if _is_open(part):
            number, part = next(rest)
            place = f"{image_key}[{number}]"
        try:
            found.append(replace(keep(part), limits=limits))
        except PictureError as exc:
            raise RowError(f"{place} {exc}") from exc
        return {"type": "image", "image": found[-1]}

    whole = [
        {**message, "content": [filled(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in split
    ]
    return whole, found


def in_files(column: Any) -> Any:
    """The pictures as files, without bytes in memory. One that cannot be kept stays, for an error with its row."""
    return column if is_empty(column) else [_in_file(each) for each in _listed(column)]


def _in_file(given: Any) -> Any:
    has_bytes = given.get("bytes") if isinstance(given, Mapping) else str(given).startswith("data:")
    try:
        return keep(given) if has_bytes else given
    except PictureError:
        return given


def _listed(column: Any) -> list[Any]:
    """Of a column that holds a list, or one thing."""
    if is_empty(column):
        return []
    value = parsed(column)
    return list(value) if isinstance(value, (list, tuple)) or hasattr(value, "tolist") else [value]


def _split(message: Mapping[str, Any], *, marks_stand_for_some: bool) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return dict(message)
    if other := next((mark for mark in OTHER_MARKS if mark in content), None):
        raise RowError(f"a message with pictures has {other}, too: models see pictures here, and nothing else")
    pieces = re.split(f"({MARK})", content) if marks_stand_for_some else [content]
    parts = [{"type": "image"} if piece == MARK else {"type": "text", "text": piece} for piece in pieces if piece]
    return {**message, "content": parts or content}


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _is_open(part: Mapping[str, Any]) -> bool:
    """Whether it says only that there is a picture."""
    return not any(value is not None for key, value in part.items() if key != "type")
