import json

import pytest

from verl.utils.config import ConfigError
from verl.utils.dataset import resolve_data_files
from verl.utils.dataset.files import Rows


def test_a_built_in_name_is_its_training_or_its_held_out_file():
    [train] = resolve_data_files("builtin:arithmetic", split="train")
    [held_out] = resolve_data_files(["builtin:arithmetic"], split="val")
    assert (train.name, held_out.name) == ("train.parquet", "test.parquet")


def test_local_files_keep_their_order(write):
    names = [str(write(["a"], name=f"{name}.parquet")) for name in ("z", "a")]
    assert [str(path) for path in resolve_data_files(names)] == names


def test_every_missing_file_is_named(write, tmp_path):
    files = [str(write(["a"])), str(tmp_path / "one.parquet"), str(tmp_path / "two.parquet")]
    with pytest.raises(ConfigError, match=r"data.val_files: no such file: .*one.parquet, .*two.parquet") as info:
        resolve_data_files(files, split="val")
    assert files[0] not in str(info.value)


def test_an_empty_list_is_refused():
    with pytest.raises(ConfigError, match="data.train_files is not set"):
        resolve_data_files([])


def test_a_directory_says_what_is_in_it(write, tmp_path):
    for name in "abcd":
        write(["1"], name=f"{name}.parquet")
    with pytest.raises(
        ConfigError, match=r"is a directory; name the files in it \(a.parquet, b.parquet, c.parquet, ..."
    ):
        resolve_data_files(str(tmp_path))


def test_a_pattern_says_which_files_it_stands_for(write, tmp_path):
    for name in "ab":
        write(["1"], name=f"{name}.parquet")
    with pytest.raises(ConfigError, match=r"\*.parquet is a pattern; .*train_files=\[.*/a.parquet,.*/b.parquet\]"):
        resolve_data_files(str(tmp_path / "*.parquet"))


LINE = json.dumps({"prompt": 1}).encode()
UNREADABLE = {
    "empty": (lambda whole: b"", "is empty: it has 0 bytes"),
    "cut": (lambda whole: whole[:-5], "is truncated: .* of which the end is missing"),
    "only its beginning": (lambda whole: whole[:4], "is truncated"),
    "a hole in it": (lambda whole: whole[:4] + bytes(len(whole) - 400) + whole[-396:], "truncated or damaged"),
    "a footer of nothing": (lambda whole: b"PAR1" + bytes(20) + b"PAR1", "cannot be read as parquet"),
    "git-lfs": (lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
    "text": (lambda whole: b"hello", "neither parquet nor JSON Lines"),
    "one list": (lambda whole: b'[{"prompt": 1}]', "jq -c"),
    "compressed": (lambda whole: b"\x1f\x8b\x08", "neither parquet nor JSON Lines"),
    "a cut line": (lambda whole: LINE + b"\n" + LINE[:-3], "line 2 of .* not JSON.*may be truncated"),
    "a bad line": (lambda whole: LINE + b"\n{]\n" + LINE, "line 2 of .* not JSON"),
    "no UTF-8": (lambda whole: b'{"prompt": "\xff"}\n', "line 1 of .* not JSON: .*utf-8"),
    "deep": (lambda whole: b'{"prompt": ' + b"[" * 100_000, "line 1 of .* not JSON"),
    "no object": (lambda whole: LINE + b"\n7\n", "line 2 of .* no JSON object: '7'"),
    "other columns": (lambda whole: b'{"promt": 1}', "has no column 'prompt'. Did you mean 'promt'"),
}


@pytest.mark.parametrize(("damage", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_that_cannot_be_read_says_why(write, damage, message):
    path = write(["a", "b"])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=message):
        Rows([path], ["prompt"])


def test_a_file_without_rows_says_so(write):
    with pytest.raises(ConfigError, match="data.parquet has no rows"):
        Rows([write([])], ["prompt"])


def test_rows_keep_their_files_types_and_places(tmp_path, write):
    (tmp_path / "b.jsonl").write_text('{"prompt": 7}\n\n{"prompt": "x", "other": null}\n')
    rows = Rows([write(["a", "b"]), tmp_path / "b.jsonl"], ["prompt"]).select(range(4))
    assert [row["prompt"] for row in rows.read(1, 9)] == [[{"role": "user", "content": "b"}], 7, "x"]
    assert all(row.keys() == rows.read(0, 1)[0].keys() for row in rows.read(0, 4))
    assert [rows.place(row).split(" of ")[0] for row in range(4)] == ["row 0", "row 1", "line 1", "line 3"]
