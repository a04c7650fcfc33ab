"""The file of metas: what goes in comes out, and nothing else is taken for one."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.checkpoint_engine.errors import ConfigError
from verl.checkpoint_engine.parameter_server.metas import load_metas, save_metas
from verl.checkpoint_engine.parameter_server.records import BufferMeta, PackedTensor, RankMetas

TENSOR = PackedTensor(name="w", shape=(3, 5), dtype="bfloat16", offset=64, nbytes=30)
BUFFER = BufferMeta(address=2**47 + 5, nbytes=128, tensors=(TENSOR,))
METAS = {
    rank: RankMetas(
        rank=rank,
        host="10.0.0.1",
        device_id=f"GPU-{rank}",
        rdma_device="mlx5_0",
        p2p_address=f"10.0.0.1:{15000 + rank}",
        buffers=(BUFFER,) * rank,
        stamp=4096,
        incarnation=2**62 - 1,
    )
    for rank in (3, 0, 7)
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_metas(tmp_path / "metas", "step-17", METAS)
    return tmp_path / "metas"


def test_name_and_metas_come_back_as_they_were(saved: Path):
    assert load_metas(saved) == ("step-17", METAS)
    assert saved.read_bytes().startswith(b"verl-sync parameter server metas, format 1, ")


def test_a_file_is_replaced_and_nothing_else_is_left(saved: Path):
    save_metas(saved, "empty", {})
    assert load_metas(str(saved)) == ("empty", {})
    assert list(saved.parent.iterdir()) == [saved]


def test_every_truncation_is_called_one(saved: Path):
    data = saved.read_bytes()
    for length in [*range(1, len(data), 17), len(data) - 1]:
        saved.write_bytes(data[:length])
        with pytest.raises(ConfigError, match=f"{saved} is truncated"):
            load_metas(saved)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"verl-sync parameter server metas, format 2, 5 bytes\nabcde", "has format 2; this version .* reads format 1"),
        (b"verl-sync parameter server metas, format 1, 5 bytes\nabcdefg", "bytes after its end: 7 bytes .* not 5"),
        (b"verl-sync parameter server metas, format 1, 5 bytes\nabcde", "is damaged: "),
        (b"verl-sync parameter server metas, format x\n", "is not a file of metas|truncated"),
        (pickle.dumps(METAS and {"rank": 1}), "is not a file of metas"),
        (b'{"metas": []}', "is not a file of metas"),
    ],
)
def test_other_files_are_refused_for_what_they_are(tmp_path: Path, data: bytes, message: str):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        load_metas(tmp_path / "file")


def test_places_that_cannot_be_read_or_written_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"cannot be read from {tmp_path}/missing: No such file"):
        load_metas(tmp_path / "missing")
    with pytest.raises(ConfigError, match=f"cannot be written to {tmp_path}/no/metas: No such file"):
        save_metas(tmp_path / "no" / "metas", "x", METAS)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe: it is no file"):
        save_metas(tmp_path / "pipe", "x", METAS)
    assert (tmp_path / "pipe").is_fifo()


@given(data=st.binary(max_size=200))
def test_no_content_is_taken_for_metas_by_accident(tmp_path_factory: pytest.TempPathFactory, data: bytes):
    path = tmp_path_factory.getbasetemp() / "fuzz"
    path.write_bytes(b"verl-sync parameter server metas, format 1, %d bytes\n%s" % (len(data), data))
    with pytest.raises(ConfigError):
        load_metas(path)
