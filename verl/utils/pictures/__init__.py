"""Pictures and videos in prompts: their form between processes, and a model's inputs for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl.utils.pictures.picture import Picture, PictureError, PixelLimits, is_turned, keep, pixel_limits, restored
from verl.utils.pictures.processing import Medium, PictureProcessor, load_processor
from verl.utils.pictures.video import FrameLimits, Video, frame_limits, keep_video

MULTI_MODAL_DATA = "multi_modal_data"
"""The key of a sample's pictures, in its item and in batches: {images: a list of `Picture`, videos: one of `Video`}. A
data set without videos leaves `videos` out."""
SEEN = "__seen__"
"""The key in batches of `PictureProcessor.digests` of what the engine saw."""


def media_in(given: Mapping[str, Any] | None) -> list[Medium]:
    """Pictures, then videos, of what `MULTI_MODAL_DATA` has of a sample."""
    return [medium for name in ("images", "videos") for medium in (given or {}).get(name) or ()]


def data_of(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of `ServerManager.generate` for it."""
    names = {"images": "image_data", "videos": "video_data"}
    return {argument: list(given[name]) for name, argument in names.items() if given and given.get(name)}


def by_kind(media: Sequence[Medium], names: Iterable[str] = ()) -> dict[str, list[Medium]]:
    """The inverse: also with `names` of which there are none."""
    found: dict[str, list[Medium]] = {name: [] for name in ("images", *names)}
    for medium in media:
        found.setdefault("videos" if isinstance(medium, Video) else "images", []).append(medium)
    return found


__all__ = [
    "MULTI_MODAL_DATA",
    "SEEN",
    "FrameLimits",
    "Medium",
    "Picture",
    "PictureError",
    "PictureProcessor",
    "PixelLimits",
    "Video",
    "by_kind",
    "data_of",
    "frame_limits",
    "is_turned",
    "keep",
    "keep_video",
    "load_processor",
    "media_in",
    "pixel_limits",
    "restored",
]
