"""A checkpoint on its way into host memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from verl.checkpoint_engine.errors import ConfigError
from verl.checkpoint_engine.parameter_server.buffers import HostBuffer, load_buffers
from verl.checkpoint_engine.parameter_server.safetensors_files import TENSOR_PARALLEL, split_files


def tensors_of(buffers: list[HostBuffer]) -> dict[str, torch.Tensor]:
    return {packed.name: buffer.tensor(packed) for buffer in buffers for packed in buffer.tensors}


def load(*files: Path, named: dict[str, torch.Tensor] | None = None, **options) -> list[HostBuffer]:
    return load_buffers(files=files, named_tensors=named, rank=0, world_size=1, **options)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "embed": torch.randn(1000, 64, generator=generator).bfloat16(),
        "norm": torch.randn(64, generator=generator),
        "scale": torch.tensor(0.5),
        "nothing": torch.zeros(0, 7),
        "mask": torch.tensor([True, False]),
        "ids": torch.arange(5),
        "half": torch.randn(3, 3, generator=generator).half(),
    }


@pytest.fixture
def saved(tmp_path: Path, model: dict[str, torch.Tensor]) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(model, path)
    return path


def test_tensors_of_files_and_given_ones_arrive_whole_in_one_buffer(saved: Path, model: dict[str, torch.Tensor]):
    given = {"transposed": torch.arange(6).reshape(2, 3).T, "other": torch.ones(4)}
    buffers = load(saved, named=given)
    assert len(buffers) == 1
    assert_same(tensors_of(buffers), model | given)


def test_what_is_packed_has_room_of_its_own_in_buffers_of_the_size_asked_for(
    saved: Path, model: dict[str, torch.Tensor]
):
    buffers = load(saved, buffer_nbytes=1024)
    assert_same(tensors_of(buffers), model)
    assert len(buffers) > 1
    for buffer in buffers:
        ends = [packed.offset + packed.nbytes for packed in buffer.tensors]
        assert all(packed.offset >= end for packed, end in zip(buffer.tensors[1:], ends, strict=False))
        assert buffer.memory.nbytes <= 1024 or len(buffer.tensors) == 1


def test_nothing_at_all_is_no_buffer():
    assert load() == []


def test_a_large_tensor_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl.checkpoint_engine.parameter_server.buffers.CHUNK_NBYTES", 1000)
    tensor = torch.randn(100, 33)
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    assert_same(tensors_of(load(tmp_path / "a.safetensors")), {"a": tensor})


def test_buffers_of_an_equal_layout_are_written_again(saved: Path, tmp_path: Path, model: dict[str, torch.Tensor]):
    before = load(saved)
    changed = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    save_file(changed, tmp_path / "next.safetensors")
    after = load(tmp_path / "next.safetensors", reuse=before)
    assert [buffer.memory.data_ptr() for buffer in after] == [buffer.memory.data_ptr() for buffer in before]
    assert_same(tensors_of(after), changed)
    other = load(named={"a": torch.ones(3)}, reuse=before)
    assert other[0].memory.data_ptr() != before[0].memory.data_ptr()


@pytest.mark.parametrize("missing", [1, 300])
def test_a_truncated_file_is_named_with_the_bytes_expected_and_there(saved: Path, missing: int):
    size = saved.stat().st_size
    with saved.open("r+b") as file:
        file.truncate(size - missing)
    with pytest.raises(ConfigError, match=rf"model\.safetensors: truncated: {size} bytes expected, {size - missing}"):
        load(saved)


@pytest.mark.parametrize("size", [0, 5, 40])
def test_a_file_that_ends_in_its_header_is_named_too(saved: Path, size: int):
    with saved.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(ConfigError, match=rf"truncated inside the header: \d+ bytes expected, {size} there"):
        load(saved)


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{nonsense", b"", "not a safetensors file"),
        ([1], b"", "not a safetensors file"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", "not a safetensors file"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4), "has 8 bytes, not 4"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, bytes(4), "malformed"),
        ({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, bytes(1), "a has the unknown dtype F4"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}, bytes(3), "begins at byte"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, bytes(3), "malformed: .* bytes expected"),
        ({"__metadata__": {TENSOR_PARALLEL: "{}"}}, b"", "the metadata 'verl.tensor_parallel'"),
    ],
)
def test_a_malformed_file_is_named_with_what_is_wrong(tmp_path: Path, header: object, data: bytes, message: str):
    with pytest.raises(ConfigError, match=rf"bad\.safetensors: .*{message}"):
        load(write(tmp_path / "bad.safetensors", header, data))


def test_a_file_of_another_kind_is_not_read_as_one_huge_header(tmp_path: Path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\x80\x02}q\x00." * 100)
    with pytest.raises(ConfigError, match="not a safetensors file: its header would have"):
        load(path)


def test_everything_wrong_is_told_at_once(saved: Path, tmp_path: Path):
    save_file({"embed": torch.ones(1), "fine": torch.ones(1)}, tmp_path / "again.safetensors")
    with pytest.raises(ConfigError) as raised:
        load(saved, tmp_path / "again.safetensors", tmp_path / "gone.safetensors")
    assert "embed: in more than one file" in str(raised.value)
    assert "gone.safetensors: No such file" in str(raised.value)


def test_a_given_tensor_may_not_be_in_a_file_too_and_must_have_a_known_dtype(saved: Path):
    named = {"embed": torch.ones(1), "complex": torch.ones(1, dtype=torch.complex64)}
    with pytest.raises(ConfigError, match=r"embed: is also in .*complex: unknown dtype torch\.complex64"):
        load(saved, named=named)


def test_too_little_memory_is_an_error_before_anything_is_allocated():
    huge = torch.zeros(1, dtype=torch.uint8).expand(2**45)
    with pytest.raises(ConfigError, match=rf"needs {2**45} bytes \(32768.00 GiB\).*; \d+ bytes .* are free"):
        load(named={"huge": huge})


def save_sharded(directory: Path, model: dict[str, torch.Tensor], dims: dict[str, int | None], size: int) -> list[Path]:
    """As every tensor-parallel rank of a trainer would write its part."""
    paths = [directory / f"rank-{rank}.safetensors" for rank in range(size)]
    for rank, path in enumerate(paths):
        parts = {
            name: model[name] if dim is None else model[name].tensor_split(size, dim)[rank]
            for name, dim in dims.items()
        }
        metadata = {TENSOR_PARALLEL: json.dumps({"rank": rank, "size": size, "dims": dims})}
        save_file({name: part.contiguous() for name, part in parts.items()}, path, metadata)
    return paths


DIMS = {"column": 0, "row": 1, "deep": 2, "norm": None}


@pytest.fixture
def parallel_model() -> dict[str, torch.Tensor]:
    return {
        "column": torch.randn(10, 6),
        "row": torch.randn(4, 7).bfloat16(),
        "deep": torch.randn(2, 3, 9),
        "norm": torch.randn(6),
    }


def test_slices_are_concatenated_along_their_declared_dimension(
    tmp_path: Path, parallel_model: dict[str, torch.Tensor]
):
    paths = save_sharded(tmp_path, parallel_model, DIMS, size=3)
    assert_same(tensors_of(load(*reversed(paths))), parallel_model)


def test_slices_that_do_not_make_a_whole_are_listed_together(tmp_path: Path, parallel_model: dict[str, torch.Tensor]):
    paths = save_sharded(tmp_path, parallel_model, DIMS, size=3)
    with pytest.raises(ConfigError) as raised:
        load(*paths[:2])
    assert all(f"{name}: its slices are not one of each rank: rank 0 of 3" in str(raised.value) for name in DIMS)
    other = parallel_model | {"row": torch.randn(5, 7).bfloat16(), "column": torch.randn(10, 6).half()}
    (tmp_path / "other").mkdir()
    paths[2] = save_sharded(tmp_path / "other", other, DIMS, size=3)[2]
    with pytest.raises(ConfigError) as raised:
        load(*paths)
    assert "row: its slices do not fit together along 1: [4, 3] bfloat16" in str(raised.value)
    assert "column: its slices do not fit together along 0" in str(raised.value)
    assert "deep" not in str(raised.value)


def test_files_are_split_evenly_and_slices_of_one_tensor_stay_together(
    tmp_path: Path, parallel_model: dict[str, torch.Tensor]
):
    sharded = save_sharded(tmp_path, parallel_model, DIMS, size=2)
    whole = [tmp_path / f"{index}.safetensors" for index in range(6)]
    for index, path in enumerate(whole):
        save_file({f"t{index}": torch.ones(300)}, path)
    ranks = split_files([*sharded, *whole], 3)
    assert sorted(path for rank in ranks for path in rank) == sorted([*sharded, *whole])
    assert len({index for index, rank in enumerate(ranks) for path in rank if path in sharded}) == 1
    assert max(len(set(rank) - set(sharded)) for rank in ranks) <= 3
    assert split_files(whole[:1], 2) == [[whole[0]], []]
