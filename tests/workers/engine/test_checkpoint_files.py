"""Full disks and foreign files, as training checkpoints and exports of two ranks meet them."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import resource
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from tests.workers.engine.engine_cases import make_engine
from tests.workers.engine.megatron_cases import make_megatron
from tests.workers.engine.test_fsdp_checkpoint import train
from verl.utils.config import ConfigError
from verl.utils.disk import DiskFull
from verl.utils.first_rank import FirstRank
from verl.workers.engine.checkpoint_files import METADATA_FILE, read_metadata, read_state, write_state

LORA = {"lora_rank": 4}
CASES = {
    "fsdp2, training state": ("fsdp2", {}, ("model", "optimizer", "extra")),
    "fsdp2, export": ("fsdp2", {}, ("hf_model",)),
    "fsdp, training state": ("fsdp", {}, ("model", "optimizer", "extra")),
    "adapters": ("fsdp2", LORA, ("model",)),
    "megatron, training state": ("megatron", {}, ("model", "optimizer", "extra")),
    "megatron, export": ("megatron", {}, ("hf_model",)),
}


def limit_files(nbytes):
    """Of this process; -1: no more."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def fill_and_go_on(path, directory, case, full_rank):
    """What each rank raises if the disk takes no more from one of them, and what the next save leaves."""
    strategy, model, contents = CASES[case]
    if strategy == "megatron":
        engine = make_megatron(path, {"tensor_model_parallel_size": 2})
    else:
        engine = make_engine(path, strategy=strategy, model=model)
        train(engine, 0, 1)
    if dist.get_rank() == full_rank:
        limit_files(1_000)
    try:
        engine.save_checkpoint(directory / "full", contents)
        told = ""
    except DiskFull as exc:
        told = str(exc)
    finally:
        limit_files(-1)
    engine.save_checkpoint(directory / "next", contents)
    return told


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("full_rank", [0, 1])
def test_every_rank_tells_of_a_full_disk_and_can_save_later(ranks, models, tmp_path, case, full_rank):
    if full_rank and CASES[case][2] != ("model", "optimizer", "extra"):
        pytest.skip("rank 0 alone writes")
    told = ranks.run(fill_and_go_on, 2, models("qwen3"), tmp_path, case, full_rank)
    for words in told:
        assert words.startswith(f"no space for {tmp_path / 'full'}")
        assert "bytes are needed" in words
        assert "bytes are free" in words
        assert "more bytes than" not in words
    # What is free may change between two looks.
    assert len({re.sub(r"\d+ bytes are free", "", words) for words in told}) == 1
    assert any((tmp_path / "next").rglob("*"))


def refused_in_advance(path, directory, contents):
    engine = make_engine(path)
    original = os.statvfs
    stats = list(original("/"))
    stats[3] = stats[4] = 0
    os.statvfs = lambda _: os.statvfs_result(stats)
    try:
        with pytest.raises(DiskFull) as caught:
            engine.save_checkpoint(directory, contents)
    finally:
        os.statvfs = original
    return str(caught.value), [str(file) for file in directory.rglob("*") if file.is_file()]


@pytest.mark.parametrize("contents", [("model", "optimizer", "extra"), ("hf_model",)])
def test_what_does_not_fit_is_refused_before_anything_is_written(ranks, models, tmp_path, contents):
    for told, written in ranks.run(refused_in_advance, 2, models("qwen3"), tmp_path / "step", contents):
        assert "0 bytes are free" in told
        assert int(told.split(": ")[1].split()[0]) > 10_000
        assert written == []


class Opens:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def write_and_spoil(directory, spoil):
    write_state(directory, {"a": {"w": torch.ones(3), "lr": 0.5, "betas": (0.9, None), "name": "x"}})
    spoil(directory)
    state = {"a": {"w": torch.zeros(3), "lr": 0.0, "betas": (), "name": ""}}
    try:
        read_state(directory, state)
    except ConfigError as exc:
        return str(exc)
    return state


def whoever_writes_digests_too(spoil, directory):
    spoil(directory)
    for file in directory.glob("digests-*.json"):
        file.unlink()


def nothing(_):
    """Leave it as it is."""


def code_in_metadata(directory):
    (directory / METADATA_FILE).write_bytes(pickle.dumps(Opens(directory / "ran")))


def code_beside_tensors(directory):
    metadata = read_metadata(directory)
    (index, place) = next((k, v) for k, v in metadata.storage_data.items() if k.fqn == "a.lr")
    saved = io.BytesIO()
    torch.save(Opens(directory / "ran"), saved)
    (directory / "foreign").write_bytes(saved.getvalue())
    place.relative_path, place.offset, place.length = "foreign", 0, len(saved.getvalue())
    (directory / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def test_numbers_and_texts_beside_tensors_come_back(ranks, tmp_path):
    (state,) = ranks.run(write_and_spoil, 1, tmp_path / "step", nothing)
    assert torch.equal(state["a"].pop("w"), torch.ones(3))
    assert state == {"a": {"lr": 0.5, "betas": (0.9, None), "name": "x"}}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (code_in_metadata, "io.open is no part of one"),
        (code_beside_tensors, "a.lr of the checkpoint is no plain value"),
    ],
)
def test_reading_a_training_checkpoint_runs_no_code_of_it(ranks, tmp_path, spoil, words):
    (told,) = ranks.run(write_and_spoil, 1, tmp_path / "step", partial(whoever_writes_digests_too, spoil))
    assert words in told
    assert not (tmp_path / "step/ran").exists()


def flip_on_first(directory):
    if dist.get_rank() == 0:
        file = directory / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    dist.barrier()


def cut_on_first(directory):
    if dist.get_rank() == 0:
        file = directory / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:-10])
    dist.barrier()


def write_parts_and_spoil(directory, spoil):
    """Ranks write a tensor each, under a name of its own."""
    name = f"w{dist.get_rank()}"
    write_state(directory, {name: torch.full((64,), 1.0)})
    dist.barrier()  # write_state ends on each rank with its own digests
    spoil(directory)
    state = {name: torch.zeros(64)}
    try:
        read_state(directory, state)
    except ConfigError as exc:
        return str(exc)
    return float(state[name].sum())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (flip_on_first, "__1_0.distcp has other bytes than when it was written"),
        (cut_on_first, r"__0_0.distcp has \d+ bytes, and had \d+ when it was written"),
    ],
)
def test_a_damaged_shard_is_named_on_every_rank(ranks, tmp_path, spoil, words):
    told = ranks.run(write_parts_and_spoil, 2, tmp_path / "step", spoil)
    assert all(re.search(f"the checkpoint is damaged: .*{words}", text) for text in told), told


def test_every_file_has_a_digest_of_the_rank_that_wrote_it(ranks, tmp_path):
    assert ranks.run(write_parts_and_spoil, 2, tmp_path / "step", nothing) == [64.0, 64.0]
    noted = [json.loads((tmp_path / f"step/digests-{rank}.json").read_text()).keys() for rank in range(2)]
    assert noted == [{METADATA_FILE, "__0_0.distcp"}, {"__1_0.distcp"}]


@pytest.mark.parametrize("content", [b"", b"x", b"\x80\x04", pickle.dumps({}), pickle.dumps(1.5), b"\xff" * 100])
def test_metadata_that_are_none_are_named(tmp_path, content):
    (tmp_path / METADATA_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=r"\.metadata is not the metadata of a checkpoint"):
        read_metadata(tmp_path)


def act_on_first(error):
    done = []
    try:
        with FirstRank() as first:
            first.do(lambda: done.append(1))
            first.do(lambda: exec("raise error", {"error": error}) if error else None)
            first.do(lambda: done.append(2))
            dist.barrier()
    except Exception as exc:  # noqa: BLE001 - what it is, is the question
        return done, f"{type(exc).__name__}: {exc}"
    return done, None


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (None, None),
        (DiskFull("no space for x"), "DiskFull: no space for x"),
        (ConfigError("key=1"), "ConfigError: key=1"),
        (OSError(5, "Input/output error"), "RuntimeError: on rank 0: [Errno 5] Input/output error"),
    ],
)
def test_what_fails_on_the_first_rank_is_raised_by_all_when_all_have_come_to_the_end(ranks, error, elsewhere):
    (done, own), (other_done, other) = ranks.run(act_on_first, 2, error)
    assert done == ([1] if error else [1, 2])
    assert other_done == []
    assert own == (f"{type(error).__name__}: {error}" if error else None)
    assert other == elsewhere


class Attribute:
    """Pickled as Python before 3.11.4 pickles a member of an enumeration: as `getattr` of it."""

    def __init__(self, of, name):
        self.of, self.name = of, name

    def __reduce__(self):
        return getattr, (self.of, self.name)


@pytest.mark.parametrize(
    ("attribute", "is_read"),
    [
        (Attribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"), True),
        (Attribute(_MEM_FORMAT_ENCODING, "__init_subclass__"), False),
        (Attribute(Metadata, "__init__"), False),
        (Attribute("text", "format"), False),
    ],
    ids=["a member", "a method of an enumeration", "a method of a class", "a method of a text"],
)
def test_metadata_of_an_older_python_are_read_and_getattr_gives_nothing_but_members(tmp_path, attribute, is_read):
    metadata = Metadata({}, planner_data=attribute)
    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    if is_read:
        assert read_metadata(tmp_path).planner_data is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    else:
        with pytest.raises(ConfigError, match="is no part of one"):
            read_metadata(tmp_path)
