"""Rows with pictures: what they become, and what each mistake in them is called before a run."""

from __future__ import annotations

import base64
import json
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from tests.pictures import encoded, in_bytes, noise, row, write
from verl.utils.builtin.seeing import ARCHITECTURES, PICTURE, make_tiny_seeing_model
from verl.utils.config import ConfigError
from verl.utils.dataset import RLHFDataset
from verl.utils.pictures import Picture, PictureError, PictureProcessor, keep, load_processor
from verl.workers.config import DataConfig


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VERL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_seeing_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def one_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_seeing_model(tmp_path_factory.mktemp("model"))


def processor_of(directory: Path) -> PictureProcessor:
    from transformers import AutoConfig

    found = load_processor(directory, AutoConfig.from_pretrained(directory))
    assert found is not None
    return found


def dataset(directory: Path, file: Path, **options: Any) -> RLHFDataset:
    from transformers import AutoTokenizer

    config = DataConfig(**{"max_prompt_length": 200, **options})
    return RLHFDataset(file, AutoTokenizer.from_pretrained(directory), config, processor_of(directory))


def of_transformers(directory: Path, text: str, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    """What the processor of transformers makes of it. Its constructor wants a video processor, and that torchvision."""
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    tokenizer, config = AutoTokenizer.from_pretrained(directory), AutoConfig.from_pretrained(directory)
    kind = PROCESSOR_MAPPING[type(config)]
    processor = kind.__new__(kind)
    processor.tokenizer, processor.video_processor = tokenizer, None
    processor.image_processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    processor.image_token, processor.video_token = PICTURE, "<|video_pad|>"
    processor.image_token_id, processor.video_token_id = config.image_token_id, config.video_token_id
    processor.chat_template = tokenizer.chat_template
    given: dict[str, torch.Tensor] = processor(text=[text], images=images, return_tensors="pt")
    return given


def test_a_prompt_has_the_ids_and_the_patches_of_transformers_own_processor(model: Path, tmp_path: Path) -> None:
    images = [noise(0), noise(1, 140, 56), noise(2, 300, 400)]
    rows = [row("a<image>b<image><image>?", in_bytes(*images)), row("no picture", [])]
    data = dataset(model, write(tmp_path / "d.parquet", rows))
    item = data[0]
    text = data.tokenizer.apply_chat_template(item["raw_prompt"], add_generation_prompt=True, tokenize=False)
    expected = of_transformers(model, text, images)
    assert item["prompt_ids"] == expected["input_ids"][0].tolist()
    found = processor_of(model).inputs(item["multi_modal_data"]["images"])
    assert torch.equal(found["pixel_values"], expected["pixel_values"])
    assert torch.equal(found["image_grid_thw"], expected["image_grid_thw"])
    assert data[1]["multi_modal_data"] == {"images": []}
    assert "images" not in item


def test_every_way_to_give_a_picture_gives_the_same_one(one_model: Path, tmp_path: Path) -> None:
    image = noise()
    (tmp_path / "x.png").write_bytes(encoded(image))
    url = f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"
    ways: list[Any] = [
        encoded(image),
        {"bytes": encoded(image), "path": "gone.png"},
        {"bytes": None, "path": str(tmp_path / "x.png")},
        str(tmp_path / "x.png"),
        f"file://{tmp_path}/x.png",
        url,
        {"image": url},
        {"type": "image_url", "image_url": {"url": url}},
        image,
        {"type": "image", "image": image},
    ]
    for way in ways:
        assert np.array_equal(np.asarray(keep(way).open()), np.asarray(image)), way
    lines = [json.dumps(row("<image>?", [url])), json.dumps(row("<image>?", str(tmp_path / "x.png")))]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    found = dataset(one_model, tmp_path / "d.jsonl")
    assert found[0]["prompt_ids"] == found[1]["prompt_ids"]
    assert found[0]["multi_modal_data"]["images"][0].digest == found[1]["multi_modal_data"]["images"][0].digest


def test_parts_of_a_message_take_the_pictures_of_the_column_or_bring_their_own(one_model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.png").write_bytes(encoded(noise(1)))
    text = {"type": "text", "text": "?", "image": None}
    parts = [{"type": "image", "text": None, "image": str(tmp_path / "own.png")}, text, {"type": "image"}]
    rows = [row([{"role": "user", "content": parts}], in_bytes(noise(2))), row("<image>?", in_bytes(noise(3)))]
    data = dataset(one_model, write(tmp_path / "d.parquet", [rows[0]]))
    content = data[0]["raw_prompt"][0]["content"]
    assert [part["type"] for part in content] == ["image", "text", "image"]
    opened = [np.asarray(picture.open()) for picture in data[0]["multi_modal_data"]["images"]]
    assert np.array_equal(opened[0], np.asarray(noise(1)))
    assert np.array_equal(opened[1], np.asarray(noise(2)))
    assert content[0]["image"] == data[0]["multi_modal_data"]["images"][0]


def test_what_is_transparent_is_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (30, 30), (0, 0, 0, 0))
    assert keep(image).open().getpixel((3, 3)) == (255, 255, 255)


def test_long_prompts_are_counted_with_their_pictures(one_model: Path, tmp_path: Path) -> None:
    rows = [row("<image>?", in_bytes(noise(0, 28, 28))), row("<image>?", in_bytes(noise(1, 112, 112)))]
    file = write(tmp_path / "d.parquet", rows)
    lengths = [len(dataset(one_model, file)[number]["prompt_ids"]) for number in range(2)]
    assert lengths[1] - lengths[0] == 15
    kept = dataset(one_model, file, max_prompt_length=lengths[0], filter_overlong_prompts=True)
    assert len(kept) == 1
    with pytest.raises(ConfigError, match="1 of 2 train prompts are longer"):
        dataset(one_model, file, max_prompt_length=lengths[0])
    with pytest.raises(ConfigError, match="have pictures, which cannot be cut"):
        dataset(one_model, file, max_prompt_length=lengths[0], truncation="left")


def huge_png() -> bytes:
    """A header of 12,000 x 12,000 pixels, and some of them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 12_000, 12_000, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * 12_001 * 10, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


DAMAGED = encoded(noise(5))[:400]
WRONG = {
    "damaged": (row("<image>?", [{"bytes": DAMAGED}]), "picture 0 is damaged, or none of BMP, GIF, JPEG, PNG, WEBP"),
    "second damaged": (row("<image><image>", [*in_bytes(noise()), {"bytes": b"x" * 50}]), "picture 1 is damaged"),
    "a bomb": (row("<image>?", [{"bytes": huge_png()}]), "picture 0 has 12000 x 12000 pixels, more than 67108864"),
    "svg": (
        row("<image>?", [{"bytes": b"<svg xmlns='http://www.w3.org/2000/svg'/>"}]),
        "picture 0 is damaged, or none",
    ),
    "eps": (row("<image>?", [{"bytes": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"}]), "picture 0 is damaged"),
    "too thin": (row("<image>?", in_bytes(noise(0, 3000, 2))), "picture 0 has 3000 x 2 pixels: absolute aspect ratio"),
    "no file": (row("<image>?", [{"path": "/no/such.png"}]), r"images\[0\] is at /no/such.png, where there is no file"),
    "remote": (
        row("<image>?", [{"path": "http://x/y.png"}]),
        r"images\[0\] is at 'http://x/y.png', and nothing is fet",
    ),
    "null": (row("<image><image>", [None, *in_bytes(noise())]), r"images\[0\] is NoneType, neither bytes"),
    "limits": (row("<image>?", [{"path": "x", "max_pixels": 9}]), r"images\[0\] has max_pixels, and only bytes, path"),
    "more marks": (row("<image><image>?", in_bytes(noise())), "prompt has 2 places for pictures, and images has 1"),
    "fewer marks": (row("?", in_bytes(noise())), "prompt has 0 places for pictures, and images has 1"),
    "no pictures": (row("<image>?", []), "prompt has 1 places for pictures, and images has 0"),
    "a video": (row("<video><image>?", in_bytes(noise())), "a message with pictures has <video>, too"),
    "the token itself": (row(f"{PICTURE}?", []), "the chat template writes 1 tokens for pictures where there are 0"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_mistake_names_file_row_and_picture(kind: str, one_model: Path, tmp_path: Path) -> None:
    wrong, said = WRONG[kind]
    good = row("<image>?", in_bytes(noise()))
    file = write(tmp_path / "some.parquet", [good, good, wrong])
    with pytest.raises(ConfigError, match=f"data.train_files: row 2 of .*some.parquet: {said}"):
        dataset(one_model, file)


def test_samples_with_damaged_pictures_are_dropped_where_long_ones_are(
    one_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [row("<image>?", in_bytes(noise(1))), WRONG["damaged"][0], WRONG["a bomb"][0]]
    data = dataset(one_model, write(tmp_path / "d.parquet", rows), filter_overlong_prompts=True)
    assert len(data) == 1
    assert "2 of 3 train samples have pictures that cannot be used (first in row 1 of" in caplog.text


def test_a_model_that_reads_text_refuses_a_column_of_pictures(one_model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = write(tmp_path / "d.parquet", [row("<image>?", in_bytes(noise()))])
    with pytest.raises(ConfigError, match="row 0 of .*: images is not empty: the model reads text alone"):
        RLHFDataset(file, AutoTokenizer.from_pretrained(one_model), DataConfig())


def test_a_picture_that_has_changed_since_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "x.png"
    file.write_bytes(encoded(noise(1)))
    picture = keep(str(file))
    file.write_bytes(encoded(noise(2)))
    with pytest.raises(PictureError, match="is no longer what it was"):
        picture.open()
    file.unlink()
    with pytest.raises(PictureError, match="where there is no file"):
        picture.open()


def test_the_driver_holds_references_and_no_pixels(one_model: Path, tmp_path: Path) -> None:
    """64 pictures of 300 kB, 19 MB as pixels and as files."""
    rows = [row("<image>?", in_bytes(noise(number, 280, 360))) for number in range(64)]
    file = write(tmp_path / "d.parquet", rows)
    assert file.stat().st_size > 15_000_000
    del rows
    dataset(one_model, write(tmp_path / "small.parquet", [row("<image>?", in_bytes(noise()))]))  # imports
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        data = dataset(one_model, file)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held + pa.total_allocated_bytes() - before < 2_000_000
    assert isinstance(data[5]["multi_modal_data"]["images"][0], Picture)


def test_a_picture_is_computed_once_while_there_is_room(one_model: Path) -> None:
    processor = processor_of(one_model)
    picture = keep(noise(7))
    first = processor.inputs([picture])["pixel_values"]
    Path(picture.path).unlink()
    assert torch.equal(processor.inputs([picture, picture])["pixel_values"], torch.cat([first, first]))
