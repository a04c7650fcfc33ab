import datetime
import errno
import functools
import json
import math
import os

import numpy as np
import pytest
import torch

from verl.checkpoint_engine.support import records


def put(path, *values):
    records.append(path, [records.encoded({"value": value}) for value in values])


def values(path):
    return [record["value"] for record in records.read(path)[0]]


def test_records_are_read_as_they_were_appended(tmp_path):
    path = tmp_path / "a.jsonl"
    put(path, 1, 2)
    put(path)
    put(path, "\ud800 \n", None)
    assert values(path) == [1, 2, "\ud800 \n", None]


def test_a_full_disk_is_told_and_ends_nothing(caplog, tmp_path):
    path = tmp_path / "a.jsonl"
    path.symlink_to("/dev/full")
    put(path, 1, 2)
    assert f"2 records are not in {path}: [Errno 28] No space left on device" in caplog.text


def test_what_a_disk_takes_half_of_is_left_out_whole(monkeypatch, tmp_path):
    path = tmp_path / "a.jsonl"
    put(path, 1)
    write = os.write
    room = [5]

    def write_some(handle, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(handle, data[: room[0]])
        room[0] -= count
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        put(path, 2)
    put(path, 3)
    assert values(path) == [1, 3]


def test_a_run_goes_on_with_what_still_counts_and_the_rest_stays_beside_it(tmp_path):
    path = tmp_path / "a.jsonl"
    put(path, 1, 2, 3)
    records.carry_over(path, lambda record: record["value"] < 3)
    records.carry_over(path, lambda record: record["value"] < 3)
    assert values(path) == [1, 2]
    assert values(tmp_path / "a-1.jsonl") == [1, 2, 3]
    assert sorted(os.listdir(tmp_path)) == ["a-1.jsonl", "a.jsonl"]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    put(path, 1)
    with path.open("a") as file:
        file.write('{"value": 2')
    assert records.read(path) == ([{"value": 1}], False)
    records.carry_over(path, lambda _: True)
    put(path, 3)
    assert values(path) == [1, 3]


@pytest.mark.parametrize("line", [b"rubbish", b"[1]", b"1", b"null", b"\xff", b"[" * 100_000, b""])
def test_what_is_no_record_is_named_when_it_is_read_and_put_aside_when_a_run_goes_on(caplog, tmp_path, line):
    path = tmp_path / "a.jsonl"
    content = json.dumps({"value": 1}).encode() + b"\n" + line + b"\n"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="line 2: not a record"):
        records.read(path)
    records.carry_over(path, lambda _: True)
    assert "line 2: not a record" in caplog.text
    assert not path.exists()
    assert (tmp_path / "a-1.jsonl").read_bytes() == content


def within_itself():
    found = {}
    found["found"] = found
    return found


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.array([[1, 2]]), [[1, 2]]),
        (torch.tensor([0.5, 1.0]), [0.5, 1.0]),
        (torch.tensor(3), 3),
        (math.nan, None),
        ([1.0, -math.inf, (2, math.inf)], [1.0, None, [2, None]]),
        (np.array([1.0, math.nan]), [1.0, None]),
        ({"a": {"b": np.float64(math.nan)}}, {"a": {"b": None}}),
        ({1: 2, ("a", 1): 3}, {"1": 2, "('a', 1)": 3}),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        ({1}, "{1}"),
        (b"x", "b'x'"),
    ],
)
def test_what_a_reward_function_returns_is_told_as_json_that_any_reader_takes(value, told):
    text = records.encoded({"value": value})
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == {"value": told}


@pytest.mark.parametrize("value", [within_itself(), functools.reduce(lambda inner, _: [inner], range(5_000), 1)])
def test_what_has_no_end_is_cut(value):
    assert len(records.encoded({"value": value})) < 100_000
