"""Rows with pictures: what they become, and what each mistake in them is called before a run."""

from __future__ import annotations

import base64
import io
import json
import pickle
import shutil
import struct
import tracemalloc
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from tests.pictures import encoded, in_bytes, noise, row, write
from tests.seeing import make_seeing
from verl.utils.builtin.seeing import ARCHITECTURES, PICTURE, make_tiny_seeing_model
from verl.utils.config import ConfigError
from verl.utils.dataset import RLHFDataset
from verl.utils.pictures import Picture, PictureError, PictureProcessor, keep, load_processor, pixel_limits, processing
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


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"processor_config.json": "LlavaNextProcessor"},
        {"preprocessor_config.json": "LlavaNextProcessor"},
        {"tokenizer_config.json": "LlavaNextProcessor"},
        {"processor_config.json": "LlavaProcessor", "tokenizer_config.json": "LlavaNextProcessor"},
    ],
)
def test_the_processor_is_the_one_that_transformers_finds(named: dict[str, str], tmp_path: Path) -> None:
    """In the file that names one first. Nothing of a picture tells that another one wrote its tokens."""
    from transformers import AutoProcessor

    model = make_seeing(tmp_path / "model", "llava")
    for name, kind in named.items():
        described = json.loads((model / name).read_text()) | {"processor_class": kind}
        (model / name).write_text(json.dumps(described))
    assert type(processor_of(model).of_transformers) is type(AutoProcessor.from_pretrained(model))


def test_a_processor_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    model = make_seeing(tmp_path / "model", "llava")
    (model / "processor_config.json").write_text(json.dumps({"processor_class": "SomebodysProcessor"}))
    with pytest.raises(ConfigError, match="transformers does not know processor_class=SomebodysProcessor"):
        processor_of(model)


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


def test_what_is_known_of_pictures_is_bounded(one_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest ones stay; of another one it is found again."""
    monkeypatch.setattr(processing, "MOST_KNOWN", 2)
    monkeypatch.setattr(processing, "MOST_SIZES", 2)
    processor, pictures = processor_of(one_model), [keep(noise(seed, 28 * seed, 28)) for seed in (1, 2, 3)]
    texts = [processor.text(picture) for picture in pictures]
    assert len(processor._of_sizes) == 2
    assert [processor.text(picture) for picture in pictures] == texts
    before = [(processor.digests([picture]), processor.counts([picture])) for picture in pictures]
    assert [count for _, (count,) in before] == [1, 2, 3]
    assert len(processor._known) == 2
    assert processor.digests(pictures) == tuple(digest for (digest,), _ in before)
    assert len(processor._known) == 2


def test_a_data_set_and_its_processor_go_to_other_processes(model: Path, tmp_path: Path) -> None:
    data = dataset(model, write(tmp_path / "d.parquet", [row("<image>?", in_bytes(noise(8)))]))
    pictures = data[0]["multi_modal_data"]["images"]
    assert data.processor is not None
    expected = data.processor.inputs(pictures)
    copied = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data.processor)) < 30_000, "with its tokenizer, without its cache"
    assert copied[0]["multi_modal_data"] == data[0]["multi_modal_data"]
    found = copied.processor.inputs(copied[0]["multi_modal_data"]["images"])
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert copied.processor.digests(pictures) == data.processor.digests(pictures)


def test_patches_that_another_process_made_otherwise_are_named(one_model: Path, tmp_path: Path) -> None:
    processor, pictures = processor_of(one_model), [keep(noise(1)), keep(noise(2))]
    first, second = digests = processor.digests(pictures)
    assert first != second
    processor.require_same(pictures, digests)
    with pytest.raises(PictureError, match=f"made other patches of {pictures[0].path} than the trainer"):
        processor.require_same(pictures, (second, first))
    with pytest.raises(PictureError, match="the engine saw 0 pictures of a sample with 2"):
        processor.require_same(pictures, ())
    other = shutil.copytree(one_model, tmp_path / "other")
    settings = json.loads((other / "preprocessor_config.json").read_text())
    settings["image_std"] = [settings["image_std"][0] * (1 + 2.0**-20), *settings["image_std"][1:]]
    (other / "preprocessor_config.json").write_text(json.dumps(settings))
    assert processor_of(other).digests(pictures)[0] != first
    assert processor_of(one_model).digests(pictures)[0] == first


SIZES = [(300, 400), (28, 28), (84, 56), (900, 120)]


@pytest.mark.parametrize(
    "given", [{"max_pixels": 6_000}, {"min_pixels": 8_000}, {"min_pixels": 10_000, "max_pixels": 15_000}], ids=str
)
def test_limits_of_pixels_give_the_tokens_and_patches_of_transformers_with_them(
    model: Path, tmp_path: Path, given: dict[str, int]
) -> None:
    """And in the processor of another process, which is told of no limits but by the picture."""
    images = [noise(number, *size) for number, size in enumerate(SIZES)]
    file = write(tmp_path / "d.parquet", [row("<image>" * len(images), in_bytes(*images))])
    data = dataset(model, file, mm_processor_kwargs=given, max_prompt_length=2000)
    pictures = data[0]["multi_modal_data"]["images"]
    alone: Any = AutoImageProcessor.from_pretrained(model, backend="pil")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        expected = alone(images=images, return_tensors="pt", **given)
    found = processor_of(model).inputs(pictures)
    assert torch.equal(found["pixel_values"], expected["pixel_values"])
    assert torch.equal(found["image_grid_thw"], expected["image_grid_thw"])
    tokens = data[0]["prompt_ids"].count(processor_of(model).token_id)
    assert tokens == int(expected["image_grid_thw"].prod(-1).sum()) // alone.merge_size**2
    plain = dataset(model, file, max_prompt_length=2000)[0]["multi_modal_data"]["images"]
    assert all(one.digest == other.digest and one.key != other.key for one, other in zip(pictures, plain, strict=True))
    assert content_of(data[0])[0]["image"] == pictures[0]


def content_of(item: dict[str, Any]) -> Any:
    return item["raw_prompt"][0]["content"]


@pytest.mark.parametrize(
    "given",
    [
        {"size": {"shortest_edge": 10_000, "longest_edge": 15_000}},
        {"images_kwargs": {"min_pixels": 10_000}, "max_pixels": 15_000},
        {"min_pixels": 10_000, "max_pixels": 15_000, "fps": None},
    ],
    ids=str,
)
def test_limits_of_pixels_are_spelled_as_transformers_spells_them(given: dict[str, Any]) -> None:
    assert pixel_limits(given) == (10_000, 15_000)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"do_resize": False}, "do_resize=False: only min_pixels, max_pixels, fps, num_frames and videos"),
        ({"size": {"height": 9}}, "size.height=9: only min_pixels"),
        ({"max_pixels": "many"}, "max_pixels=many: give a number of pixels, at least 1"),
        ({"max_pixels": 0}, "max_pixels=0: give a number"),
        ({"min_pixels": 9, "max_pixels": 8}, "min_pixels=9 are more than max_pixels=8"),
    ],
)
def test_what_a_processor_is_not_told_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        pixel_limits(given)


def test_limits_that_do_not_fit_those_of_the_model_are_refused(one_model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "d.parquet", [row("<image>?", in_bytes(noise()))])
    with pytest.raises(ConfigError, match="data.mm_processor_kwargs: min_pixels=.* are more than max_pixels=9"):
        dataset(one_model, file, mm_processor_kwargs={"max_pixels": 9})


def palette(transparency: int | None = None) -> Image.Image:
    image = Image.new("P", (60, 60), 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    return image if transparency is None else Image.open(io.BytesIO(saved(image, "PNG", transparency=transparency)))


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, format=kind, **options)
    return written.getvalue()


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


KINDS = {
    "turned by EXIF": saved(noise(1, 60, 90), "JPEG", exif=turned()),
    "CMYK": saved(noise(1).convert("CMYK"), "JPEG"),
    "palette": saved(palette(), "PNG"),
    "transparent palette": saved(palette(), "PNG", transparency=0),
    "transparent grey": saved(Image.new("LA", (60, 60), (90, 0)), "PNG"),
    "transparent colour": saved(Image.new("RGB", (60, 60), (9, 8, 7)), "PNG", transparency=(9, 8, 7)),
    "black and white": saved(noise(1).convert("1"), "PNG"),
    "grey": saved(noise(1).convert("L"), "BMP"),
    "animated": saved(noise(1), "GIF", save_all=True, append_images=[noise(2)]),
    "WEBP": saved(noise(1), "WEBP", lossless=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_of_any_kind_is_what_transformers_processor_alone_makes_of_it(kind: str, one_model: Path) -> None:
    """Which turns nothing. RGBA alone is another thing: see above."""
    alone: Any = AutoImageProcessor.from_pretrained(one_model, backend="pil")
    expected = alone(images=[Image.open(io.BytesIO(KINDS[kind]))], return_tensors="pt")
    found = processor_of(one_model).inputs([keep(KINDS[kind])])
    assert torch.equal(found["image_grid_thw"], expected["image_grid_thw"])
    assert torch.equal(found["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "LAB", "PA", "P", "1"])
def test_an_image_of_pil_in_any_mode_is_its_colours(mode: str) -> None:
    given = Image.new("RGB", (30, 30), (10, 200, 30)).convert("LA" if mode == "PA" else "RGB")
    given = given.convert(mode) if mode != "LAB" else Image.new("LAB", (30, 30), (10, 20, 30))
    assert np.array_equal(np.asarray(keep(given).open()), np.asarray(given.convert("RGB")))


UNUSABLE: dict[str, tuple[Any, str]] = {
    "16-bit grey": (
        saved(Image.fromarray(np.full((30, 30), 30_000, np.uint16)), "PNG"),
        "has values of more than 8 bits .mode I;16",
    ),
    "empty": (b"", "is damaged, or none of"),
    "truncated": (saved(noise(1), "JPEG")[:900], "is damaged, or none of"),
    "truncated GIF": (saved(noise(1), "GIF")[:200], "is damaged, or none of"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_what_no_processor_reads_right_is_refused_with_its_row(kind: str, one_model: Path, tmp_path: Path) -> None:
    data, said = UNUSABLE[kind]
    file = write(tmp_path / "some.parquet", [row("<image>?", in_bytes(noise())), row("<image>?", [{"bytes": data}])])
    with pytest.raises(ConfigError, match=f"data.train_files: row 1 of .*some.parquet: picture 0 {said}"):
        dataset(one_model, file)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (Image.new("RGB", (0, 5)), "cannot be kept as PNG: ValueError: cannot write empty image"),
        (Image.new("LA", (9, 9)).convert("La"), "cannot be kept as PNG: ValueError: conversion from La to L not"),
        (Image.fromarray(np.full((9, 9), 0.5, np.float32)), "more than 8 bits .mode F., of which"),
        (Image.fromarray(np.full((9, 9), 70_000, np.int32)), "more than 8 bits .mode I., of which"),
    ],
    ids=["zero-size", "premultiplied", "float", "int"],
)
def test_an_image_of_pil_that_cannot_be_kept_is_refused(image: Image.Image, said: str) -> None:
    with pytest.raises(PictureError, match=said):
        keep(image)


def test_pictures_that_ask_to_be_turned_are_told_of(
    one_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [row("<image>?", in_bytes(noise())), row("<image>?", [{"bytes": KINDS["turned by EXIF"]}])]
    dataset(one_model, write(tmp_path / "d.parquet", rows))
    assert "1 pictures ask to be turned or mirrored by their EXIF orientation (first in row 1 of" in caplog.text
