"""Two roles in one process per rank, on a real Ray."""

import os
import threading

import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray.base import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)


class Counting(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self):
        return self.rank, self.world_size, os.getpid(), threading.get_ident()


class Actor(Counting):
    def __init__(self, marker):
        self.marker = marker
        self.rank_in_init = self.rank

    def close(self):
        (self.marker / f"actor-{self.rank}").touch()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data):
        data.batch["x"] += self.rank_in_init
        return data

    def plain(self):
        return "of the actor"


class Critic(Counting):
    def __init__(self, *, factor, marker):
        self.factor, self.marker = factor, marker

    def close(self):
        (self.marker / f"critic-{self.rank}").touch()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    async def scale(self, data):
        data.batch["x"] *= self.factor
        return data

    @register()
    def fail(self):
        raise KeyError("critic")


@pytest.fixture(scope="module")
def marker(tmp_path_factory):
    return tmp_path_factory.mktemp("closed")


@pytest.fixture(scope="module")
def group(ray_cluster, marker):
    roles = {
        "actor": RayClassWithInitArgs(Actor, marker),
        "critic": RayClassWithInitArgs(cls=Critic, factor=10, marker=marker),
    }
    pool = RayResourcePool(process_on_nodes=[2])
    with RayWorkerGroup(resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls(class_dict=roles)) as made:
        yield made
    assert {path.name for path in marker.iterdir()} == {"actor-0", "actor-1", "critic-0", "critic-1"}


def numbers():
    return DataProto.from_dict(tensors={"x": torch.zeros(4, dtype=torch.long)})


def test_roles_share_the_processes_their_thread_and_their_ranks(group):
    groups = group.spawn(prefix_set={"actor", "critic"})
    assert groups.keys() == {"actor", "critic"}
    assert {one.world_size for one in groups.values()} == {2}
    places = groups["actor"].where()
    assert [place[:2] for place in places] == [(0, 2), (1, 2)]
    assert len({place[2] for place in places}) == 2
    assert groups["critic"].where() == places


def test_a_role_is_called_as_a_group_of_its_own_and_the_group_by_prefixed_names(group):
    groups = group.spawn(prefix_set=["actor", "critic"])
    added = groups["actor"].add(numbers())
    assert added.batch["x"].tolist() == [0, 0, 1, 1]
    assert groups["critic"].scale(added).get(timeout=60).batch["x"].tolist() == [0, 0, 10, 10]
    assert group.actor_add(numbers()).batch["x"].tolist() == [0, 0, 1, 1]
    assert groups["critic"].submit("scale", added).get(timeout=60).batch["x"].tolist() == [0, 0, 10, 10]
    assert groups["actor"].execute_all_sync("plain") == ["of the actor"] * 2
    assert groups["actor"].execute_rank_zero_sync("plain") == "of the actor"


def test_what_a_role_raises_names_it_and_leaves_the_others_usable(group):
    with pytest.raises(KeyError) as raised:
        group.spawn(prefix_set=["critic"])["critic"].fail()
    assert "critic_fail raised KeyError on rank" in raised.value.__notes__[0]
    assert len(group.actor_where()) == 2


def test_a_role_or_method_that_is_not_there_is_named(group):
    with pytest.raises(ValueError, match="has no role 'ref'; known: actor, critic"):
        group.spawn(prefix_set=["actor", "ref"])
    with pytest.raises(AttributeError, match=r"no method 'actor_ad'; meant 'actor_add'\?"):
        group.spawn(prefix_set=["actor"])["actor"].ad(numbers())


class Clash(Worker):
    def b_c(self):
        """With role `a` what `c` is with role `a_b`."""

    def c(self):
        """See above."""


def test_roles_that_cannot_be_together_are_refused():
    with pytest.raises(ValueError, match="one role at least"):
        create_colocated_worker_cls({})
    with pytest.raises(TypeError, match="role 'actor' needs a RayClassWithInitArgs"):
        create_colocated_worker_cls({"actor": Actor})
    with pytest.raises(TypeError, match="two methods would be called 'a_b_c'"):
        create_colocated_worker_cls({"a": RayClassWithInitArgs(Clash), "a_b": RayClassWithInitArgs(Clash)})
