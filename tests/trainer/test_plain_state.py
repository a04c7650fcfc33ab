import datetime
import io
import shutil
from decimal import Decimal

import numpy as np
import pytest
import torch
from PIL import Image

from verl.protocol import DataProto
from verl.trainer.plain_state import from_plain, to_plain
from verl.utils.config import ConfigError
from verl.utils.pictures import keep


def through_a_file(value):
    file = io.BytesIO()
    torch.save(to_plain(value), file)
    file.seek(0)
    return from_plain(torch.load(file, weights_only=True))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        10**30,
        0.5,
        "text \u4f60",
        b"\x00\xff",
        [1, [2, "x"]],
        (1, (2,)),
        {"a": [{"b": None}], 3: 4},
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
        datetime.date(2026, 1, 2),
        datetime.time(3, 4, 5, 6),
        datetime.timedelta(days=-3, microseconds=7),
        Decimal("1.500"),
        np.float32(1.5),
        np.int64(3),
        np.bool_(True),
    ],
    ids=repr,
)
def test_a_value_comes_back_as_it_was(value):
    back = through_a_file(value)
    assert back == value
    assert type(back) is type(value)


def test_a_batch_comes_back_as_it_was():
    batch = DataProto.from_dict(
        {"ids": torch.arange(6).reshape(2, 3), "logs": torch.rand(2, 3, dtype=torch.bfloat16)},
        {"prompt": [[{"role": "user"}], []], "rows": [np.arange(3), None], "score": [np.float32(1), 2]},
        {"step": 3, "seconds": {"gen": 0.5}},
    )
    back = through_a_file((1, batch))[1]
    assert {key: tensor.dtype for key, tensor in back.batch.items()} == {"ids": torch.int64, "logs": torch.bfloat16}
    assert all(torch.equal(back.batch[key], batch.batch[key]) for key in ("ids", "logs"))
    assert back.non_tensor_batch["prompt"].tolist() == batch.non_tensor_batch["prompt"].tolist()
    assert back.non_tensor_batch["rows"][0].tolist() == [0, 1, 2]
    assert back.meta_info == batch.meta_info


def test_pictures_come_back_wherever_their_bytes_are_kept_now(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_CACHE_DIR", str(tmp_path / "before"))
    picture = keep(Image.new("RGB", (30, 30), "red"))
    sample = {"multi_modal_data": [{"images": [picture]}, {"images": []}]}
    batch = DataProto.from_dict({}, sample)
    assert through_a_file(batch).non_tensor_batch["multi_modal_data"].tolist() == sample["multi_modal_data"]
    shutil.move(tmp_path / "before", tmp_path / "now")
    monkeypatch.setenv("VERL_CACHE_DIR", str(tmp_path / "now"))
    (found,) = through_a_file(batch).non_tensor_batch["multi_modal_data"][0]["images"]
    assert (found.digest, found.open().getpixel((3, 3))) == (picture.digest, (255, 0, 0))
    monkeypatch.setenv("VERL_CACHE_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=f"a picture of the checkpoint's samples is neither at {picture.path} nor at"):
        through_a_file(batch)


class Custom:
    def __str__(self):
        return "a thing"


def test_what_cannot_be_kept_is_named():
    with pytest.raises(TypeError, match="'a thing', which is a Custom"):
        to_plain({"x": [Custom()]})


@pytest.mark.parametrize(
    "value",
    [(), (1,), ("x", 1), ("dict", 3), ("dict", [1]), ("batch", [1]), ("array", ["<i4", [3], b"123"]), ("tensor", 1)]
    + [("picture", 1), ("picture", ["x"])]
    + [("datetime", "x"), ("decimal", "x"), ("array", ["O", [1], b"12345678"]), {"dict": 1}, [[]], ("dict", [([], 1)])],
    ids=repr,
)
def test_what_was_not_written_like_this_is_an_error(value):
    with pytest.raises(ConfigError, match="is no part of a batch"):
        from_plain(value)
