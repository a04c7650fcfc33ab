"""Checkpoints that are written while their ranks train on hold what those hold that are waited for."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest
import torch
import torch.distributed as dist

from tests.workers.engine.engine_cases import make_engine
from tests.workers.engine.megatron_cases import make_megatron
from tests.workers.engine.megatron_cases import train as train_megatron
from tests.workers.engine.test_checkpoint_files import limit_files
from tests.workers.engine.test_fsdp_checkpoint import CONTENTS, OPTIM, train
from verl.checkpoint_engine.errors import TransportTimeout
from verl.utils.disk import DiskFull
from verl.workers.engine.background import BackgroundWriter
from verl.workers.engine.checkpoint_files import METADATA_FILE

DISTRIBUTED = {"tensor_model_parallel_size": 1, "use_distributed_optimizer": True}
PLENTY, NOTHING = 2**40, 0
DEADLINE_S = 60.0


def fsdp(path, options):
    return make_engine(path, optim=OPTIM, **options), lambda engine, seeds: train(engine, seeds[0], len(seeds))


def megatron(path, options):
    return make_megatron(path, options), train_megatron


class Meeting:
    """A writer that looks at the state when training has come to the optimizer step that will change it, not before."""

    def __init__(self, engine, free_nbytes):
        self._free_nbytes, self._stepping = free_nbytes, threading.Event()
        self.writer = BackgroundWriter(local_ranks=2, timeout_s=DEADLINE_S, free_nbytes=self._free)
        engine._before_step = self._before_step

    def _free(self):
        assert self._stepping.wait(DEADLINE_S)
        return self._free_nbytes

    def _before_step(self):
        self._stepping.set()
        self.writer.await_copied()


def loaded(engine, directory):
    engine.load_checkpoint(directory, CONTENTS)
    return {name: tensor.clone() for name, tensor in engine.snapshot().items()} | {"drawn": torch.rand(3)}


def save_both_ways(make, path, options, directory, free_nbytes):
    engine, train_on = make(path, options)
    train_on(engine, (0, 1))
    meeting = Meeting(engine, free_nbytes)
    engine.save_checkpoint(directory / "waited", CONTENTS)
    engine.begin_checkpoint(directory / "background", CONTENTS, meeting.writer.write)
    is_early = (directory / "background" / METADATA_FILE).exists()
    train_on(engine, (2, 3))
    took = asyncio.run(meeting.writer.written())
    after = {name: tensor.clone() for name, tensor in engine.snapshot().items()}
    one, other = (loaded(engine, directory / name) for name in ("waited", "background"))
    return {
        "early": is_early,
        "equal": one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one),
        "trained": not all(torch.equal(after[name], other[name]) for name in after),
        "told": took.background_s > 0 and took.waited_s > 0,
    }


@pytest.mark.parametrize(
    ("make", "options", "free_nbytes"),
    [
        (fsdp, {}, PLENTY),
        (fsdp, {}, NOTHING),
        (fsdp, {"strategy": "fsdp"}, PLENTY),
        (megatron, DISTRIBUTED, PLENTY),
    ],
    ids=["fsdp2", "no memory for a copy", "fsdp", "distributed optimizer"],
)
def test_what_is_written_while_ranks_train_on_is_the_state_they_had(
    ranks, models, tmp_path, make, options, free_nbytes
):
    for found in ranks.run(save_both_ways, 2, make, models("qwen2", True), options, tmp_path, free_nbytes):
        assert found == {"early": False, "equal": True, "trained": True, "told": True}


def fill_the_disk(path, directory):
    engine = make_engine(path)
    writer = BackgroundWriter(local_ranks=2, timeout_s=DEADLINE_S)
    if dist.get_rank() == 1:
        limit_files(1_000)
    try:
        engine.begin_checkpoint(directory / "full", CONTENTS, writer.write)
        asyncio.run(writer.written())
        told = ""
    except DiskFull as exc:
        told = str(exc)
    finally:
        limit_files(-1)
    writer.await_copied()
    engine.begin_checkpoint(directory / "next", CONTENTS, writer.write)
    asyncio.run(writer.written())
    return told


def test_every_rank_tells_of_a_disk_that_is_full_in_the_background_and_can_save_later(ranks, models, tmp_path):
    told = ranks.run(fill_the_disk, 2, models("qwen2", True), tmp_path)
    # What is free may change between two looks.
    one, other = (re.sub(r"\d+ bytes are free", "", words) for words in told)
    assert one == other
    assert one.startswith(f"no space for {tmp_path / 'full'}: ")
    assert not (tmp_path / "full" / METADATA_FILE).exists()
    assert (tmp_path / "next" / METADATA_FILE).exists()


def wait_for_a_copy(directory):
    told = threading.Event()
    writer = BackgroundWriter(local_ranks=1, timeout_s=0.2, free_nbytes=lambda: int(told.wait(60)))
    writer.write(directory, {"a": torch.ones(3)})
    with pytest.raises(TransportTimeout, match=r"still needs the training state after 0\.2 s"):
        writer.await_copied()
    told.set()
    asyncio.run(writer.written())


def test_a_step_waits_for_a_copy_no_longer_than_for_a_collective(ranks, tmp_path):
    ranks.run(wait_for_a_copy, 1, tmp_path / "step")


def fail_to_write(directory):
    directory.touch()  # where a directory is to be
    writer = BackgroundWriter(local_ranks=1, timeout_s=DEADLINE_S)
    writer.write(directory / "step", {"a": torch.ones(3)})
    writer.await_copied()
    with pytest.raises(RuntimeError, match="step was not written: .* Not a directory"):
        asyncio.run(writer.written())


def test_a_step_does_not_wait_for_a_save_that_has_failed(ranks, tmp_path):
    ranks.run(fail_to_write, 1, tmp_path / "file")
