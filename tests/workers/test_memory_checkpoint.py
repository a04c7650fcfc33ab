"""The state of trainer ranks in memory: whole and verified, or not there."""

import asyncio

import pytest
import torch

from verl.checkpoint_engine.errors import ConfigError, IntegrityError
from verl.checkpoint_engine.memory.committed import open_committed
from verl.workers.engine.snapshots import copy_into
from verl.workers.memory_checkpoint.keeper import StateKeeper
from verl.workers.memory_checkpoint.rank import RankMemory


class Rank:
    """State of every kind: large, of several dtypes, a scalar, nothing at all."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.state = {
            "model.weight": torch.randn(700, 513, generator=generator),
            "model.half": torch.randn(33, generator=generator).bfloat16(),
            "model.strided": torch.randn(8, 6, generator=generator).T,
            "model.nothing": torch.zeros(0),
            "optimizer.step": torch.tensor(float(seed)),
            "rng": torch.randint(0, 255, (5056,), dtype=torch.uint8, generator=generator),
        }
        self.memory = RankMemory(lambda: self.state)

    def restore(self, saved):
        copy_into({name: tensor for name, tensor in self.state.items() if tensor.numel()}, saved)


@pytest.fixture
def keeper(tmp_path):
    keeper = StateKeeper(job="test", shm_dir=str(tmp_path))
    yield keeper
    keeper.close()


def keep(keeper, ranks, step):
    slots = keeper.begin(step)
    for index, rank in enumerate(ranks):
        rank.memory.begin_copy(slots[index])
    return {index: asyncio.run(rank.memory.copied()) for index, rank in enumerate(ranks)}


def reserved(keeper, *ranks):
    keeper.reserve({index: rank.memory.plan.encode() for index, rank in enumerate(ranks)})
    return ranks


def is_equal(one, other):
    return all(torch.equal(tensor, other.state[name]) for name, tensor in one.state.items())


def test_ranks_that_are_started_again_get_what_those_before_them_left(keeper):
    ranks = reserved(keeper, Rank(1), Rank(2))
    for step in (1, 2, 3):
        for rank in ranks:
            rank.state["model.weight"] += 1.0
            rank.state["optimizer.step"] += 1.0
        keeper.commit(step, keep(keeper, ranks, step))
    arenas = keeper.arenas_of(3)
    for index, left in enumerate(ranks):
        new = Rank(9)
        new.memory.check(arenas[index], 3)
        new.memory.load(arenas[index], 3, new.restore)
        assert is_equal(new, left)


def test_what_not_all_ranks_have_left_is_not_there(keeper):
    ranks = reserved(keeper, Rank(1), Rank(2))
    keeper.commit(1, keep(keeper, ranks, 1))
    before = ranks[0].state["model.weight"].clone()
    ranks[0].state["model.weight"] += 1.0
    ranks[0].memory.begin_copy(keeper.begin(2)[0])
    asyncio.run(ranks[0].memory.copied())
    new = Rank(9)
    new.memory.load(keeper.arenas_of(1)[0], 1, new.restore)
    assert torch.equal(new.state["model.weight"], before)
    keeper.commit(2, keep(keeper, ranks, 2))
    assert keeper.arenas_of(2)


def test_what_one_host_has_beyond_the_others_is_given_up(keeper):
    (rank,) = reserved(keeper, Rank(1))
    for step in (1, 2):
        keeper.commit(step, keep(keeper, [rank], step))
    assert keeper.arenas_of(1)
    with pytest.raises(IntegrityError, match="that of step 1"):
        keeper.arenas_of(2)


def test_a_byte_that_has_changed_is_found_before_anything_is_restored(keeper):
    (rank,) = reserved(keeper, Rank(1))
    keeper.commit(1, keep(keeper, [rank], 1))
    arena = keeper.arenas_of(1)[0]
    with open_committed(arena, 1) as (_, view):
        path, offset = view.path, view.layout.offsets[view.layout.index["model.weight"]] + 1_000_003
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(IntegrityError, match=r"model\.weight"):
        Rank(9).memory.check(arena, 1)


def test_the_state_of_another_model_is_not_taken(keeper):
    (rank,) = reserved(keeper, Rank(1))
    keeper.commit(1, keep(keeper, [rank], 1))
    other = Rank(2)
    other.state["model.weight"] = torch.zeros(3)
    with pytest.raises(IntegrityError, match="another model"):
        other.memory.check(keeper.arenas_of(1)[0], 1)


def test_training_waits_until_its_state_is_copied(keeper):
    (rank,) = reserved(keeper, Rank(1))
    before = rank.state["model.weight"].clone()
    slot = keeper.begin(1)[0]
    rank.memory.begin_copy(slot)
    rank.memory.await_copied()
    rank.state["model.weight"] += 1.0
    keeper.commit(1, {0: asyncio.run(rank.memory.copied())})
    new = Rank(9)
    new.memory.load(keeper.arenas_of(1)[0], 1, new.restore)
    assert torch.equal(new.state["model.weight"], before)


def test_a_state_that_takes_more_than_half_of_the_free_memory_is_not_kept(tmp_path):
    keeper = StateKeeper(job="test", shm_dir=str(tmp_path), free_nbytes=lambda: 2**20)
    with pytest.raises(ConfigError, match="more than half of the host's free memory"):
        reserved(keeper, Rank(1))
