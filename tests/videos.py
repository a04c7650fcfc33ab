"""Videos for tests: files, frames, and what transformers alone makes of prompts with them. Wants torchvision and av."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.pictures import encoded, noise
from tests.seeing import make_seeing

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
RATE = 10
"""Frames in a second of files."""


def movie(frames: Sequence[Image.Image], kind: str = "mp4", codec: str = "mpeg4") -> bytes:
    """A file of them."""
    import av

    written = io.BytesIO()
    with av.open(written, "w", format=kind) as container:
        stream: Any = container.add_stream(codec, rate=RATE)
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, "yuv420p"
        for frame in [*map(av.VideoFrame.from_image, frames), None]:
            for packet in stream.encode(frame):
                container.mux(packet)
    return written.getvalue()


def scenes(count: int, seed: int = 0, width: int = 84, height: int = 56) -> list[Image.Image]:
    return [noise(100 * seed + number, width, height) for number in range(count)]


def in_frames(frames: Sequence[Image.Image], rate: float) -> dict[str, Any]:
    """As a column of videos has them."""
    return {"video": [{"bytes": encoded(frame), "path": None} for frame in frames], "sample_fps": rate, "bytes": None}


def in_file(frames: Sequence[Image.Image]) -> dict[str, Any]:
    return {"video": None, "sample_fps": None, "bytes": movie(frames)}


def make_with_videos(directory: Path, name: str, *, seed: int = 0) -> Path:
    """A tiny model of the family, with the processor of videos that its checkpoints have."""
    make_seeing(directory, name, seed=seed)
    described = json.loads((directory / "preprocessor_config.json").read_text())
    del described["image_processor_type"]
    if not name.startswith("qwen2"):  # counts the pixels of all frames
        size = described["size"]
        described["size"] = {edge: 4 * pixels for edge, pixels in size.items()}
    described["video_processor_type"] = "Qwen2VLVideoProcessor" if name.startswith("qwen2") else "Qwen3VLVideoProcessor"
    (directory / "video_preprocessor_config.json").write_text(json.dumps(described, indent=2) + "\n")
    file = directory / "chat_template.jinja"
    mark = "<|vision_start|><|video_pad|><|vision_end|>"
    otherwise = "{% elif part['type'] == 'video' %}" + mark + "{% else %}"
    template = file.read_text()
    if "'video'" not in template:
        head, _, tail = template.rpartition("{% else %}{{ part['text'] }}")
        assert head
        file.write_text(head + otherwise + "{{ part['text'] }}" + tail)
    return directory


def by_transformers(
    directory: Path, text: str, images: Sequence[Image.Image], videos: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The inputs of the model for a prompt, by its own processor alone, which samples files. All videos of a prompt are
    files, or none is."""
    import av
    from transformers import AutoImageProcessor, AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(directory)
    pictures: Any = AutoImageProcessor
    processor.image_processor = pictures.from_pretrained(directory, backend="pil")
    decoded, described = [], []
    for video in videos:
        if video["bytes"] is None:
            frames = [np.asarray(Image.open(io.BytesIO(frame["bytes"]))) for frame in video["video"]]
        else:
            with av.open(io.BytesIO(video["bytes"])) as container:
                frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        rate = video["sample_fps"] or RATE
        described.append({"fps": rate, "total_num_frames": len(frames), "duration": len(frames) / rate})
        if video["bytes"] is None:
            described[-1]["frames_indices"] = list(range(len(frames)))
        decoded.append(np.stack(frames))
    sampled = bool(videos) and videos[0]["bytes"] is not None
    options = {"do_sample_frames": sampled, "video_metadata": described, **({"fps": 2.0} if sampled else {})}
    return dict(
        processor(
            text=[text],
            images=list(images) or None,
            videos=decoded or None,
            videos_kwargs=options if videos else {},
            return_tensors="pt",
            add_special_tokens=False,
        )
    )
