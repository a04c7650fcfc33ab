"""The state of trainer ranks in memory: whole and verified, or not there."""

import asyncio
from dataclasses import replace

import pytest
import torch

from verl.checkpoint_engine.errors import ConfigError, IntegrityError, TransportError
from verl.checkpoint_engine.memory.arena import open_committed
from verl.workers.engine.snapshots import copy_into
from verl.workers.memory_checkpoint.keeper import StateKeeper
from verl.workers.memory_checkpoint.rank import RankMemory

HOST = "127.0.0.1"


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


class TestOnOtherHosts:
    """Keepers of three hosts: ranks, a copy of what they left, and where they are started again."""

    @pytest.fixture
    def hosts(self, tmp_path):
        keepers = [StateKeeper(job=f"test-{number}", shm_dir=str(tmp_path)) for number in range(3)]
        yield keepers
        for keeper in keepers:
            keeper.close()

    def test_a_copy_is_all_that_ranks_on_a_third_host_need(self, hosts):
        owner, reader, other = hosts
        ranks = reserved(owner, Rank(1), Rank(2))
        for step in (1, 2, 3):
            ranks[0].state["model.weight"] += 1.0
            owner.commit(step, keep(owner, ranks, step))
            assert reader.fetch(step, owner.lend(step, (0, 1), to=[HOST], with_plans=step == 1)) > 0
        owner.close()  # its host is gone
        assert reader.steps() == ({}, {0: [3, 2], 1: [3, 2]})
        other.fetch(3, reader.lend(3, (1,), to=[HOST], copies=True, with_plans=True), own=True)
        other.fetch(3, reader.lend(3, (0,), to=[HOST], copies=True, with_plans=True), own=True)
        for rank, arena in other.arenas_of(3).items():
            new = Rank(9)
            new.memory.check(arena, 3)
            new.memory.load(arena, 3, new.restore)
            assert is_equal(new, ranks[rank])

    def test_what_was_not_copied_whole_leaves_the_copy_of_the_step_before(self, hosts):
        owner, reader, _ = hosts
        ranks = reserved(owner, Rank(1), Rank(2))
        owner.commit(1, keep(owner, ranks, 1))
        reader.fetch(1, owner.lend(1, (0, 1), to=[HOST], with_plans=True))
        owner.commit(2, keep(owner, ranks, 2))
        lent = owner.lend(2, (0, 1), to=[HOST])
        with pytest.raises(IntegrityError, match="are not what the trainer sent"):
            reader.fetch(2, replace(lent, digests={**lent.digests, 1: bytes(len(lent.digests[1]))}))
        with pytest.raises(TransportError, match="has not registered these bytes"):
            reader.fetch(2, replace(lent, places={**lent.places, 1: (64, lent.places[1][1])}))
        assert reader.steps()[1] == {0: [1], 1: [1]}
        reader.fetch(2, lent)
        assert reader.steps()[1] == {0: [2, 1], 1: [2, 1]}

    def test_a_host_without_the_memory_says_so_and_has_no_copy(self, hosts, tmp_path):
        small = StateKeeper(job="small", shm_dir=str(tmp_path), free_nbytes=lambda: 2**20)
        ranks = reserved(hosts[0], Rank(1))
        hosts[0].commit(1, keep(hosts[0], ranks, 1))
        with pytest.raises(ConfigError, match="more than half of the host's free memory"):
            small.fetch(1, hosts[0].lend(1, (0,), to=[HOST], with_plans=True))
        assert small.steps() == ({}, {})
        small.close()


def test_a_state_that_takes_more_than_half_of_the_free_memory_is_not_kept(tmp_path):
    keeper = StateKeeper(job="test", shm_dir=str(tmp_path), free_nbytes=lambda: 2**20)
    with pytest.raises(ConfigError, match="more than half of the host's free memory"):
        reserved(keeper, Rank(1))
