import errno
import os

import pytest
import torch
from safetensors.torch import save_file

from tests.full_disk import no_file_larger_than
from verl.utils.disk import DiskFull, full_disk_told, require_space


def with_torch(path):
    torch.save(torch.zeros(100_000), path)


def with_torch_into_a_file(path):
    with path.open("wb") as file:
        torch.save(torch.zeros(100_000), file)


def with_safetensors(path):
    save_file({"w": torch.zeros(100_000)}, path)


def with_python(path):
    path.write_bytes(bytes(400_000))


WRITERS = [with_torch, with_torch_into_a_file, with_safetensors, with_python]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_whichever_library_writes_a_full_disk_is_told_with_path_and_bytes(tmp_path, write):
    path = tmp_path / "file"
    with (
        no_file_larger_than(100_000),
        pytest.raises(DiskFull, match=rf"no space for {path}: 400000 bytes are needed, \d+ bytes are free"),
        full_disk_told(path, 400_000),
    ):
        write(path)


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_what_else_goes_wrong_is_told_as_it_is(tmp_path, write):
    with (
        pytest.raises(Exception, match="No such file|does not exist|Parent directory") as caught,
        full_disk_told(tmp_path),
    ):
        write(tmp_path / "missing/file")
    assert not isinstance(caught.value, DiskFull)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_quota_is_a_full_disk(tmp_path, code):
    with pytest.raises(DiskFull, match="no space for"), full_disk_told(tmp_path):
        raise OSError(code, os.strerror(code))


def test_what_does_not_fit_is_refused_before_it_is_written(tmp_path):
    path = tmp_path / "not/yet/there"
    require_space(path, 1)
    with pytest.raises(DiskFull, match=rf"no space for {path}: {10**18} bytes are needed"):
        require_space(path, 10**18)
