import pytest

from verl.utils.config import ConfigError
from verl.utils.dataset import resolve_data_files


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
    with pytest.raises(ConfigError, match="data.train_files is empty"):
        resolve_data_files([])
