"""The built-in data set with pictures: count one shape in a drawing. Parquet files in verl's schema."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image

DATA_SOURCE = "builtin/shapes"
SHAPES = ("circle", "square", "triangle")
CELL = 28
GRIDS = ((2, 2), (3, 2), (2, 3))
"""Columns and rows of cells; a drawing has a shape in some of them."""
COLOURS = ("crimson", "royalblue", "seagreen", "darkorange")


@dataclass(frozen=True, kw_only=True)
class ShapesRecipe:
    """The parameters of the data; any change makes a new data set beside the old one."""

    train_size: int = 2048
    test_size: int = 256
    seed: int = 0
    version: int = 1


@dataclass(frozen=True)
class Drawing:
    """A picture, and the question about it."""

    picture: Image.Image
    question: str
    answer: str


def drawings(seed: int | str) -> Iterator[Drawing]:
    """An endless sequence of drawings, determined by the seed."""
    chooser = random.Random(seed)
    while True:
        columns, rows = chooser.choice(GRIDS)
        asked = chooser.choice(SHAPES)
        count = chooser.randrange(columns * rows)
        others = [shape for shape in SHAPES if shape != asked]
        cells = [asked] * count + [chooser.choice([*others, ""]) for _ in range(columns * rows - count)]
        chooser.shuffle(cells)
        yield Drawing(_drawn(cells, columns, rows, chooser), f"<image>{asked}s?", str(count))


def _drawn(cells: list[str], columns: int, rows: int, chooser: random.Random) -> Image.Image:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (columns * CELL, rows * CELL), "white")
    pen = ImageDraw.Draw(picture)
    for number, shape in enumerate(cells):
        size = chooser.randint(16, 24)
        left = number % columns * CELL + chooser.randint(1, CELL - size - 1)
        top = number // columns * CELL + chooser.randint(1, CELL - size - 1)
        box = (left, top, left + size, top + size)
        colour = chooser.choice(COLOURS)
        if shape == "circle":
            pen.ellipse(box, fill=colour)
        elif shape == "square":
            pen.rectangle(box, fill=colour)
        elif shape == "triangle":
            pen.polygon([(left, top + size), (left + size, top + size), (left + size // 2, top)], fill=colour)
    return picture


def row(drawing: Drawing, split: str, index: int) -> dict[str, Any]:
    written = io.BytesIO()
    drawing.picture.save(written, format="PNG")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": drawing.question}],
        "images": [{"bytes": written.getvalue(), "path": None}],
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": drawing.answer},
        "extra_info": {"split": split, "index": index},
    }


def make_shapes(directory: Path, recipe: ShapesRecipe) -> None:
    """Write `train.parquet` and `test.parquet`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for split, size in (("train", recipe.train_size), ("test", recipe.test_size)):
        drawn = zip(range(size), drawings(f"{recipe.seed} {split}"), strict=False)
        rows = [row(drawing, split, index) for index, drawing in drawn]
        pq.write_table(pa.Table.from_pylist(rows), directory / f"{split}.parquet")
