"""Who sends to whom."""

from __future__ import annotations

import pytest

from verl.checkpoint_engine.errors import BackendUnavailable, PlanError
from verl.checkpoint_engine.plan.topology import (
    Lane,
    across_hosts,
    best_of,
    broadcast,
    chain,
    direct,
    lane_of,
    p2p_broadcast,
    tree,
)
from verl.checkpoint_engine.plan.types import Member


def members(role: str, *indices: int) -> list[Member]:
    return [Member(role=role, index=index, host=f"{role}-host-{index}") for index in indices]


@pytest.mark.parametrize(
    ("trainers", "nodes", "audience"),
    [
        ([0, 1], [], {"trainer-0": (), "trainer-1": ()}),
        ([0], [0], {"trainer-0": ("node-0",)}),
        ([0, 1], [0, 1], {"trainer-0": ("node-0",), "trainer-1": ("node-0",), "node-0": ("node-1",)}),
        ([0], [2, 0, 1], {"trainer-0": ("node-0",), "node-0": ("node-1",), "node-1": ("node-2",)}),
        ([0], [1, 5], {"trainer-0": ("node-1",), "node-1": ("node-5",)}),
    ],
)
def test_in_a_chain_owners_send_to_the_first_node_and_every_node_to_the_next(trainers, nodes, audience):
    topology = chain(members("trainer", *trainers), members("node", *nodes))
    assert topology.audience == audience
    assert [node.index for node in topology.nodes] == sorted(nodes)


@pytest.mark.parametrize(
    ("trainers", "nodes", "devices", "audience"),
    [
        ([0, 1], [0], {}, {"trainer-0": ("node-0",), "trainer-1": ("node-0",)}),
        ([0], [1, 0], {}, {"trainer-0": ("node-0",), "node-0": ("node-1",)}),
        (
            [0, 1],
            [2, 0, 1],
            {},
            {
                "trainer-0": ("node-0", "node-1"),
                "trainer-1": ("node-0", "node-1"),
                "node-0": ("node-1",),
                "node-1": ("node-2",),
                "node-2": ("node-0",),
            },
        ),
        (
            [0, 1],
            [0, 1],
            {"trainer-0": "host/mlx5_0", "trainer-1": "host/mlx5_0"},
            {"trainer-0": ("node-0",), "trainer-1": ("node-0",), "node-0": ("node-1",)},
        ),
    ],
)
def test_as_many_nodes_pull_as_trainers_have_devices_and_each_passes_on_to_the_next(trainers, nodes, devices, audience):
    topology = p2p_broadcast(members("trainer", *trainers), members("node", *nodes), devices)
    assert topology.audience == audience
    assert [node.index for node in topology.nodes] == sorted(nodes)


@pytest.mark.parametrize(
    ("nodes", "audience"),
    [
        ([0], {"node-0": ()}),
        ([1, 0], {"node-0": ("node-1",), "node-1": ()}),
        (
            range(6),
            {
                "node-0": ("node-1", "node-2"),
                "node-1": ("node-3", "node-4"),
                "node-2": ("node-5",),
                "node-3": (),
                "node-4": (),
                "node-5": (),
            },
        ),
    ],
)
def test_in_a_tree_every_node_serves_two(nodes, audience):
    topology = tree(members("trainer", 0), members("node", *nodes))
    assert topology.audience == {"trainer-0": ("node-0",), **audience}


@pytest.mark.parametrize("build", [chain, tree, p2p_broadcast])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_node_gets_what_it_does_not_read_from_owners_from_one_other_node(build, count):
    topology = build(members("trainer", 0, 1, 2), members("node", *range(count)))
    for node in topology.nodes:
        before = topology.before(node.name)
        reads_all = topology.receivers == (node.name,)
        assert (before is None) == reads_all
        assert before is None or node.name in topology.audience[before.name]


@pytest.mark.parametrize("build", [direct, broadcast])
@pytest.mark.parametrize(
    ("trainers", "nodes", "audience"),
    [
        ([0], [0], {"trainer-0": ("node-0",)}),
        ([0], [0, 1, 2], {"trainer-0": ("node-0", "node-1", "node-2")}),
        ([0, 1], [0], {"trainer-0": ("node-0",), "trainer-1": ("node-0",)}),
        ([0, 1], [0, 1], {"trainer-0": ("node-0", "node-1"), "trainer-1": ("node-0", "node-1")}),
    ],
)
def test_every_owner_sends_its_own_pieces_to_every_node(build, trainers, nodes, audience):
    topology = build(members("trainer", *trainers), members("node", *nodes))
    assert topology.audience == audience
    assert [member.name for member in topology.trainers] == list(audience)


def test_a_group_has_its_owner_as_rank_0_and_the_nodes_in_one_order_wherever_it_is_computed():
    expected = ("trainer-1", "node-0", "node-1", "node-2")
    for order in ([0, 1, 2], [2, 0, 1]):
        topology = broadcast(members("trainer", 0, 1), members("node", *order))
        assert topology.group_of("trainer-1") == expected


def test_members_of_one_name_are_refused():
    with pytest.raises(PlanError, match="members with the same name: node-1"):
        broadcast(members("trainer", 0), members("node", 0, 1, 1))


def on_hosts(role: str, hosts: str) -> list[Member]:
    return [Member(role=role, index=index, host=host) for index, host in enumerate(hosts)]


@pytest.mark.parametrize(
    ("trainers", "nodes", "relays"),
    [
        ("aa", "a", ["", ""]),
        ("aa", "aaa", ["", ""]),
        ("ab", "ab", ["1", "0"]),
        ("ab", "aabb", ["1", "0"]),
        ("aab", "ab", ["2", "2", "0"]),
        ("abb", "ab", ["1", "0", "0"]),
        ("aabb", "ab", ["2", "3", "0", "1"]),
        ("abab", "ab", ["1", "0", "3", "2"]),
        ("aaab", "ab", ["3", "3", "3", "0"]),
        ("abc", "abc", ["12", "02", "01"]),
        ("aabbcc", "abc", ["24", "35", "04", "15", "02", "13"]),
    ],
)
def test_every_piece_goes_once_to_every_other_host_and_the_ranks_there_share_the_work(trainers, nodes, relays):
    topology = across_hosts(on_hosts("trainer", trainers), on_hosts("node", nodes))
    assert topology.audience == {
        f"trainer-{rank}": tuple(f"trainer-{relay}" for relay in to) for rank, to in enumerate(relays)
    }


@pytest.mark.parametrize(("trainers", "nodes", "lonely"), [("a", "ab", "b"), ("ab", "a", "b"), ("ac", "ab", "b, c")])
def test_hosts_without_a_trainer_rank_or_without_a_node_are_named(trainers, nodes, lonely):
    with pytest.raises(
        BackendUnavailable, match=f"needs a trainer rank and a rollout node on each host; .*: {lonely}\\."
    ):
        across_hosts(on_hosts("trainer", trainers), on_hosts("node", nodes))


@pytest.mark.parametrize(
    ("num_owners", "devices", "threads"),
    [(1, [None], 2), (8, [None] * 8, 2), (9, [0, 1, 2, 3, 4, 5, 6, 7, 0], 1)],
)
def test_many_owners_share_lanes(num_owners, devices, threads):
    lanes = [lane_of(owner, num_owners=num_owners) for owner in range(num_owners)]
    assert lanes == [Lane(device=device, threads=threads) for device in devices]


@pytest.mark.parametrize(
    ("topologies", "trainers", "nodes", "best"),
    [
        (("direct", "chain"), "a", "b", "direct"),
        (("direct", "chain"), "aa", "bc", "chain"),
        (("direct", "chain"), "ab", "cd", "direct"),
        (("direct", "chain"), "ab", "cde", "chain"),
        (("direct", "chain"), "a", "aaa", "direct"),
        (("direct", "chain"), "a", "ab", "direct"),
        (("direct", "chain"), "a", "bbb", "direct"),
        (("broadcast",), "a", "bcd", "broadcast"),
    ],
)
def test_more_hosts_of_nodes_than_of_trainers_make_a_chain(topologies, trainers, nodes, best):
    assert best_of(topologies, trainer_hosts=trainers, node_hosts=nodes) == best
