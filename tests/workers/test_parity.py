"""Parity of states: any one host of a group may be lost, at any moment, and what its ranks left is made again."""

import asyncio
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.workers.test_memory_checkpoint import Rank, is_equal
from verl.checkpoint_engine.errors import ConfigError, IntegrityError, TransportError
from verl.checkpoint_engine.plan.sync_plan import SyncPlan
from verl.trainer.fleet.state_keepers import find, groups_of
from verl.workers.memory_checkpoint.keeper import StateKeeper
from verl.workers.memory_checkpoint.stripes import Stripes

HOST = "127.0.0.1"


class Hosts:
    """A group, its ranks, and what the driver does with their keepers, one call at a time. Host 0 has two ranks."""

    def __init__(self, number, directory):
        self.number = number
        self.ranks = [(0, 1), *((rank,) for rank in range(2, number + 1))]
        self.states = [Rank(rank) for rank in range(number + 1)]
        self.keepers = [StateKeeper(job=f"test-{host}", shm_dir=str(directory)) for host in range(number)]
        self.plans = [{rank: self.states[rank].memory.plan.encode() for rank in ranks} for ranks in self.ranks]
        for keeper, plans in zip(self.keepers, self.plans, strict=True):
            keeper.reserve(plans)
        self.digests = {}
        self.kept = None

    def calls(self, step):
        """What is done for a step, one after the other."""
        slots, lent = {}, []
        for rank in self.states:
            rank.state["model.weight"] += 1.0
        for keeper in self.keepers:
            slots |= keeper.begin(step)
            yield "begin"
        digests = {}
        for rank, state in enumerate(self.states):
            state.memory.begin_copy(slots[rank])
            digests[rank] = asyncio.run(state.memory.copied())
            yield "copy"
        self.digests[step] = digests
        for keeper, ranks in zip(self.keepers, self.ranks, strict=True):
            keeper.commit(step, {rank: digests[rank] for rank in ranks})
            if keeper is self.keepers[-1]:
                self.kept = step
            yield "commit"
        for keeper, ranks in zip(self.keepers, self.ranks, strict=True):
            lent.append(keeper.lend(step, ranks, to=[HOST], with_plans=step == 1))
            yield "lend"
        for number, keeper in enumerate(self.keepers):
            keeper.protect(step, number, *lent)
            yield "protect"

    def find(self, lost):
        held = [None if host == lost else keeper.steps() for host, keeper in enumerate(self.keepers)]
        return find(self.kept, self.ranks, held)

    def rebuild(self, lost, step, into, **how):
        others = [host for host in range(self.number) if host != lost]
        lent = [self.keepers[host].lend(step, self.ranks[host], to=[HOST], with_parity=True) for host in others]
        digests = {rank: self.digests[step][rank] for rank in self.ranks[lost]}
        into.rebuild(step, self.plans, lost, digests, *lent, **how)

    def close(self):
        for keeper in self.keepers:
            keeper.close()


@pytest.fixture
def hosts(tmp_path):
    made = []

    def make(number):
        made.append(Hosts(number, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("number", [2, 3, 5])
def test_ranks_on_another_host_get_what_those_on_a_lost_one_left(hosts, tmp_path, number):
    group = hosts(number)
    for step in (1, 2, 3):
        list(group.calls(step))
    for lost in range(number):
        other = StateKeeper(job=f"other-{lost}", shm_dir=str(tmp_path))
        try:
            assert group.find(lost).step == 3
            group.rebuild(lost, 3, other, as_own=True)
            for rank, arena in other.arenas_of(3).items():
                new = Rank(9)
                new.memory.check(arena, 3)
                new.memory.load(arena, 3, new.restore)
                assert is_equal(new, group.states[rank])
        finally:
            other.close()


NUMBER = 3
CALLS = 4 * NUMBER + NUMBER + 1


@pytest.mark.parametrize("done", range(CALLS + 1))
def test_a_host_may_be_lost_after_any_call(hosts, done):
    """The state is then that of the step before, until all others have parity of this one."""
    group = hosts(NUMBER)
    for step in (1, 2):
        list(group.calls(step))
    calls = group.calls(3)
    made = [call for _, call in zip(range(done), calls, strict=False)]
    assert len(made) == done
    assert done < CALLS or next(calls, None) is None
    protected = made.count("protect")
    for lost in reversed(range(NUMBER)):  # going back to the step before makes hosts forget this one
        found = group.find(lost)
        assert found.step == (3 if protected >= NUMBER - (lost == NUMBER - 1) else 2)
        assert list(found.lost) == [lost]
        helper = group.keepers[(lost + 1) % NUMBER]
        group.rebuild(lost, found.step, helper, as_own=False)  # raises unless every digest is right
        lent = helper.lend(found.step, group.ranks[lost], to=[HOST], rebuilt=True)
        assert lent.digests == {rank: group.digests[found.step][rank] for rank in group.ranks[lost]}


def test_what_was_not_read_whole_leaves_the_parity_of_the_step_before(hosts):
    group = hosts(2)
    list(group.calls(1))
    assert [call for _, call in zip(range(7), group.calls(2), strict=False)][-1] == "commit"
    lent = [keeper.lend(2, ranks, to=[HOST]) for keeper, ranks in zip(group.keepers, group.ranks, strict=True)]
    wrong = replace(lent[0], digests={**lent[0].digests, 1: bytes(len(lent[0].digests[1]))})
    with pytest.raises(IntegrityError, match="of rank 1 are not what it left"):
        group.keepers[1].protect(2, 1, wrong, lent[1])
    gone = replace(lent[0], places={**lent[0].places, 1: (64, lent[0].places[1][1])})
    with pytest.raises(TransportError, match="has not registered these bytes"):
        group.keepers[1].protect(2, 1, gone, lent[1])
    assert group.keepers[1].steps()[1] == [1]
    group.keepers[1].protect(2, 1, *lent)
    assert group.keepers[1].steps()[1] == [2, 1]


def test_a_byte_of_parity_that_has_changed_is_found_before_anything_is_there(hosts, tmp_path):
    group = hosts(3)
    list(group.calls(1))
    path = next((tmp_path / "verl-test-1-parity").glob("slot-0.*"))
    with path.open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(IntegrityError, match="are not what the trainer sent"):
        group.rebuild(0, 1, group.keepers[2], as_own=False)
    with pytest.raises(IntegrityError, match="that of step None"):
        group.keepers[2].lend(1, (0,), to=[HOST], rebuilt=True)


def test_a_host_without_the_memory_says_so_and_has_no_parity(hosts, tmp_path):
    group = hosts(2)
    lent = [keeper.lend(1, ranks, to=[HOST], with_plans=True) for keeper, ranks in _committed(group)]
    small = StateKeeper(job="small", shm_dir=str(tmp_path), free_nbytes=lambda: 2**20)
    with pytest.raises(ConfigError, match="more than half of the host's free memory"):
        small.protect(1, 1, *lent)
    assert small.steps() == ({}, [])
    small.close()


def _committed(group):
    made = [call for _, call in zip(range(7), group.calls(1), strict=False)]
    assert made[-1] == "commit"
    return zip(group.keepers, group.ranks, strict=True)


@pytest.mark.parametrize("members", [2, 3, 4, 5])
def test_stripes_have_every_byte_once_on_each_other_host_and_are_about_as_long(members):
    plans = [
        {rank: SyncPlan.decode(Rank().memory.plan.encode()) for rank in range(2 * number, 2 * number + 2)}
        for number in range(members)
    ]
    stripes = Stripes(plans)
    for member, ranks in enumerate(plans):
        seen = {rank: np.zeros(plan.layout.nbytes, np.uint8) for rank, plan in ranks.items()}
        for holder in range(members):
            if holder != member:
                at = 0
                for run in stripes.of(member, holder):
                    assert run.at == at
                    at += run.nbytes
                    seen[run.rank][run.offset : run.offset + run.nbytes] += 1
                assert at <= stripes.nbytes
        assert all((count == 1).all() for count in seen.values())
    total = sum(plan.layout.nbytes for plan in plans[0].values())
    assert stripes.nbytes <= total / (members - 1) + 2**20 + 8


def test_hosts_are_in_groups_of_two_to_five():
    assert groups_of(1) == []
    for number in range(2, 40):
        groups = groups_of(number)
        assert [host for group in groups for host in group] == list(range(number))
        assert all(2 <= len(group) <= 5 for group in groups)


@pytest.mark.parametrize(("first", "second"), product(range(6), repeat=2))
def test_two_hosts_may_be_lost_if_they_are_in_different_groups(first, second):
    ranks = [(host,) for host in range(6)]
    held = [None if host in (first, second) else ({host: [5, 4]}, [5, 4]) for host in range(6)]
    if first == second or (first < 3) != (second < 3):
        assert set(find(5, ranks, held).lost) == {first, second}
    else:
        with pytest.raises(TransportError, match="not whole"):
            find(5, ranks, held)


def test_a_host_whose_parity_lags_has_the_run_go_back_to_the_step_before():
    held = [({0: [5, 4]}, [5, 4]), ({1: [5, 4]}, [4, 3]), None]
    assert find(5, [(0,), (1,), (2,)], held).step == 4
    held[1] = ({1: [5, 4]}, [3])
    with pytest.raises(TransportError, match="not whole"):
        find(5, [(0,), (1,), (2,)], held)
    assert find(5, [(0,), (1,), (2,)], [*held[:2], ({2: [5, 4]}, [])]).step == 5, "nothing is lost"
