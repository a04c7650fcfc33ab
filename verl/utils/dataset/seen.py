"""Finds a prompt's pictures and videos: marks in messages, or parts of messages, and the columns with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.utils.config import ConfigError
from verl.utils.dataset.schema import RowError, is_empty, parsed
from verl.utils.dataset.settings import DataSettings
from verl.utils.pictures import (
    FrameLimits,
    Medium,
    Picture,
    PictureError,
    PictureProcessor,
    PixelLimits,
    Video,
    frame_limits,
    keep,
    keep_video,
    pixel_limits,
)

MARK = "<image>"
MARKS = {MARK: "image", "<video>": "video"}
"""In a text, and the type of part that each stands for."""
NAMES = {"image": "picture", "video": "video"}
NEVER_TEXT = ("<video>", "<audio>")
"""Marks that stand for something beside pictures, in whichever column it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Where the pictures and videos of rows are, and how they are limited."""

    prompt_key: str
    image_key: str
    video_key: str
    pixels: PixelLimits = PixelLimits()
    frames: FrameLimits = FrameLimits()

    @classmethod
    def of(cls, config: DataSettings, processor: PictureProcessor | None) -> Columns:
        """Raises ConfigError for limits that the processor does not have."""
        given = config.mm_processor_kwargs
        pixels = pixel_limits(given)
        try:
            pixels = pixels if processor is None else processor.limited(pixels)
        except ConfigError as exc:
            raise ConfigError(f"data.mm_processor_kwargs: {exc}") from exc
        keys = {"prompt_key": config.prompt_key, "image_key": config.image_key, "video_key": config.video_key}
        return cls(**keys, pixels=pixels, frames=frame_limits(given))

    def kept(self, type_: str, given: Any) -> Medium:
        """Raises PictureError for one that cannot be kept."""
        if type_ == "video":
            return keep_video(given).limited(self.frames)
        return replace(keep(given), limits=self.pixels)

    def keys(self) -> dict[str, str]:
        return {"image": self.image_key, "video": self.video_key}


def with_media(
    messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], columns: Columns
) -> tuple[list[dict[str, Any]], list[Medium]]:
    """The messages with each picture as a separate part {type, image}, and each video as {type, video}; and both in
    their order.

    The columns of `row` have one for each mark in a text, and for each part of such a type without its own. If there
    are any, every text becomes a list of parts, as in verl. Where the files have a column, a mark without a picture is
    a mistake.

    Raises RowError for different numbers of marks and pictures, and for a picture that cannot be kept.
    """
    keys = columns.keys()
    given = {type_: _listed(row.get(key)) for type_, key in keys.items()}
    marks = [mark for mark, type_ in MARKS.items() if keys[type_] in row]
    in_parts = any(part["type"] in keys for message in messages for part in _parts(message))
    marked = any(mark in _text_of(message) for message in messages for mark in marks)
    if not any(given.values()) and not in_parts and not marked:
        return [dict(message) for message in messages], []
    split = [_split(message, marks) for message in messages]
    for type_, key in keys.items():
        wanted = sum(part["type"] == type_ and _is_open(part) for message in split for part in _parts(message))
        if wanted != len(given[type_]):
            raise RowError(
                f"{columns.prompt_key} has {wanted} places for {NAMES[type_]}s, and {key} has {len(given[type_])}"
            )
    rest = {type_: iter(enumerate(each)) for type_, each in given.items()}
    found: list[Medium] = []

    def filled(part: Mapping[str, Any]) -> dict[str, Any]:
        type_ = part["type"]
        if type_ not in keys:
            return dict(part)
        place, value = f"the {NAMES[type_]} in {columns.prompt_key}", part
        if _is_open(part):
            number, value = next(rest[type_])
            place = f"{keys[type_]}[{number}]"
        try:
            found.append(columns.kept(type_, value))
        except PictureError as exc:
            raise RowError(f"{place} {exc}") from exc
        return {"type": type_, type_: found[-1]}

    whole = [
        {**message, "content": [filled(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in split
    ]
    return whole, found


def in_files(column: Any) -> Any:
    """The pictures as files, without bytes in memory. One that cannot be kept stays, for an error with its row."""
    return column if is_empty(column) else [_in_file(each, keep) for each in _listed(column)]


def videos_in_files(column: Any) -> Any:
    """Likewise of videos, with the frames of each."""
    if is_empty(column):
        return column
    return [in_files(each) if isinstance(each, list) else _in_file(each, keep_video) for each in _listed(column)]


def _in_file(given: Any, kept: Callable[[Any], Picture | Video]) -> Any:
    has_bytes = str(given).startswith("data:")
    if isinstance(given, Mapping):
        has_bytes = given.get("bytes") or isinstance(given.get("video"), (list, bytes))
    try:
        return kept(given) if has_bytes else given
    except PictureError:
        return given


def _listed(column: Any) -> list[Any]:
    """Of a column that holds a list, or one thing."""
    if is_empty(column):
        return []
    value = parsed(column)
    return list(value) if isinstance(value, (list, tuple)) or hasattr(value, "tolist") else [value]


def _split(message: Mapping[str, Any], marks: Sequence[str]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return dict(message)
    if other := next((mark for mark in NEVER_TEXT if mark in content and mark not in marks), None):
        raise RowError(f"a message with pictures has {other}, too, of which the files have no column")
    pieces = re.split(f"({'|'.join(marks)})", content) if marks else [content]
    parts = [{"type": MARKS[piece]} if piece in marks else {"type": "text", "text": piece} for piece in pieces if piece]
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
