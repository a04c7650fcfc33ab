"""Pictures, data and models that see, for tests."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

ROOT = Path(__file__).parents[1]
TORCHVISION = ROOT / ".venv/vision"
"""Where `make vision` puts it: beside the environment, of which it would be part in every process."""
HAS_TORCHVISION = TORCHVISION.exists() or importlib.util.find_spec("torchvision") is not None


def with_torchvision() -> dict[str, str]:
    """The environment of a process of its own that finds it."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TORCHVISION), str(ROOT), *sys.path])}


def noise(seed: int = 0, width: int = 84, height: int = 56) -> Image.Image:
    """A picture that is like no other: the tiny models make (width / 28) x (height / 28) tokens of it."""
    values = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    written = io.BytesIO()
    image.save(written, format=kind)
    return written.getvalue()


def row(content: Any, images: Any = None, **columns: Any) -> dict[str, Any]:
    prompt = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return {
        "data_source": "s",
        "prompt": prompt,
        "images": images,
        "reward_model": {"style": "rule", "ground_truth": "1"},
        **columns,
    }


def in_bytes(*images: Image.Image) -> list[dict[str, Any]]:
    return [{"bytes": encoded(image), "path": None} for image in images]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path
