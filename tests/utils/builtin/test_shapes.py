from __future__ import annotations

import io
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
from PIL import Image

from verl.utils.builtin.shapes import CELL, SHAPES, ShapesRecipe, drawings, make_shapes
from verl.utils.builtin.warm_sight import TinyQwen25VLRecipe, make_warm_seeing_model
from verl.utils.reward_score import default_compute_score

SMALL = ShapesRecipe(train_size=12, test_size=6)


def test_the_same_recipe_draws_the_same_and_splits_share_nothing(tmp_path: Path) -> None:
    files = {}
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        make_shapes(tmp_path / name, SMALL)
        files[name] = {split: (tmp_path / name / f"{split}.parquet").read_bytes() for split in ("train", "test")}
    assert files["one"] == files["other"]
    splits = [pq.read_table(tmp_path / "one" / f"{split}.parquet").to_pylist() for split in ("train", "test")]
    assert [len(rows) for rows in splits] == [12, 6]
    seen = [{row["images"][0]["bytes"] for row in rows} for rows in splits]
    assert not seen[0] & seen[1]


def test_a_drawing_has_a_cell_for_each_shape_and_its_count_is_the_answer(tmp_path: Path) -> None:
    make_shapes(tmp_path, SMALL)
    for row in pq.read_table(tmp_path / "train.parquet").to_pylist():
        image = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        columns, rows = image.width // CELL, image.height // CELL
        drawn = sum(
            len(image.crop((x * CELL, y * CELL, (x + 1) * CELL, (y + 1) * CELL)).getcolors()) > 1
            for x in range(columns)
            for y in range(rows)
        )
        truth = row["reward_model"]["ground_truth"]
        assert int(truth) <= drawn
        assert row["prompt"][0]["content"].removeprefix("<image>").removesuffix("s?") in SHAPES
        assert default_compute_score(row["data_source"], f" {truth}", truth) == 1.0
        assert default_compute_score(row["data_source"], f"{truth}?", truth) == 0.0
    assert {drawing.answer for drawing in islice(drawings(0), 200)} == set("012345")


def test_the_warm_up_writes_a_model_with_its_image_processor(tmp_path: Path) -> None:
    recipe = TinyQwen25VLRecipe(hidden_size=64, layers=1, depth=1, batch_size=4, max_counting_steps=1, habit_steps=1)
    make_warm_seeing_model(tmp_path, recipe)
    names = {file.name for file in tmp_path.iterdir()}
    assert {"model.safetensors", "preprocessor_config.json", "tokenizer.json", "config.json"} <= names
