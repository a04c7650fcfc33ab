"""The built-in data set: two-digit additions as parquet files in verl's schema."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA_SOURCE = "builtin/arithmetic"
SPLITS = ("train", "test")


@dataclass(frozen=True, kw_only=True)
class ArithmeticRecipe:
    """The parameters of the data; any change makes a new data set beside the old one."""

    smallest: int = 10
    largest: int = 99
    test_size: int = 256
    seed: int = 0
    version: int = 1


def problems(recipe: ArithmeticRecipe, split: str) -> list[tuple[int, int]]:
    """All pairs of operands of a split, shuffled. No pair is in both splits."""
    numbers = range(recipe.smallest, recipe.largest + 1)
    pairs = [(left, right) for left in numbers for right in numbers]
    random.Random(recipe.seed).shuffle(pairs)
    return pairs[: recipe.test_size] if split == "test" else pairs[recipe.test_size :]


def number_of_problems(split: str) -> int:
    recipe = ArithmeticRecipe()
    pairs = (recipe.largest - recipe.smallest + 1) ** 2
    return recipe.test_size if split == "test" else pairs - recipe.test_size


def question(left: int, right: int) -> str:
    return f"{left}+{right}="


def rows(recipe: ArithmeticRecipe, split: str) -> list[dict[str, Any]]:
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question(left, right)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(left + right)},
            "extra_info": {"split": split, "index": index},
        }
        for index, (left, right) in enumerate(problems(recipe, split))
    ]


def make_arithmetic(directory: Path, recipe: ArithmeticRecipe) -> None:
    """Write `train.parquet` and `test.parquet`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for split in SPLITS:
        pq.write_table(pa.Table.from_pylist(rows(recipe, split)), directory / f"{split}.parquet")
