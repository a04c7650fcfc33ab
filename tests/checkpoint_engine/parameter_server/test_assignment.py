"""Who pulls which bucket: cases, and what holds for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.checkpoint_engine.errors import PlanError
from verl.checkpoint_engine.parameter_server.buckets import assign_receiver_ranks, topology_of
from verl.checkpoint_engine.parameter_server.records import RankMetas

Topology = dict[str, set[int]]


def numbered(owners: list[int]) -> list[tuple[int, str]]:
    return [(owner, f"b{number}") for number, owner in enumerate(owners)]


@pytest.mark.parametrize(
    ("owners", "local", "remote", "assigned"),
    [
        pytest.param([], {"l0": {0}}, {"r0": {0}}, [], id="nothing to do"),
        pytest.param([0], {"l0": {8}}, {"r0": {0}}, [(8, 0, "b0")], id="one of each"),
        pytest.param(
            [0, 0, 1, 1],
            {"l0": {8}, "l1": {9}},
            {"r0": {0}, "r1": {1}},
            [(8, 0, "b0"), (9, 1, "b2"), (8, 0, "b1"), (9, 1, "b3")],
            id="a device each: every round is full, devices interleaved",
        ),
        pytest.param(
            [0, 1, 0],
            {"l0": {9, 8}, "l1": {11, 10}},
            {"r0": {0, 1}},
            [(8, 0, "b0"), (8, 1, "b1"), (8, 0, "b2")],
            id="one sender device: one receiver, the smallest rank, in order",
        ),
        pytest.param(
            [0, 1, 2],
            {"l0": {8, 9, 10}},
            {"r0": {0}, "r1": {1}, "r2": {2}},
            [(8, 0, "b0"), (8, 1, "b1"), (8, 2, "b2")],
            id="one receiver: a bucket per round",
        ),
        pytest.param(
            [0, 0, 0, 1],
            {"l0": {8}, "l1": {9}},
            {"r0": {0}, "r1": {1}},
            [(8, 0, "b0"), (9, 1, "b3"), (8, 0, "b1"), (8, 0, "b2")],
            id="a busy sender device ends the round",
        ),
        pytest.param(
            [0, 1, 2],
            {"l0": {8}, "l1": {9}, "l2": {10}},
            {"r0": {0}, "r1": {1, 2}},
            [(8, 0, "b0"), (9, 1, "b1"), (8, 2, "b2")],
            id="ranks that share a device do not serve at once",
        ),
        pytest.param(
            [1, 0],
            {"l0": {8}, "l1": {9}},
            {"r0": {0}, "r1": {1}},
            [(8, 1, "b0"), (9, 0, "b1")],
            id="devices take turns as they appear",
        ),
        pytest.param(
            [0, 1],
            {"l1": {9}, "l0": {8}},
            {"r0": {0}, "r1": {1}},
            [(8, 0, "b0"), (9, 1, "b1")],
            id="the order of a topology's keys does not matter",
        ),
        pytest.param(
            [0, 1],
            {"d0": {0}, "d1": {1}},
            {"d0": {0}, "d1": {1}},
            [(0, 0, "b0"), (1, 1, "b1")],
            id="ranks may receive and own",
        ),
    ],
)
def test_buckets_are_assigned_in_rounds(
    owners: list[int], local: Topology, remote: Topology, assigned: list[tuple[int, int, str]]
):
    assert assign_receiver_ranks(numbered(owners), local, remote) == assigned


def test_an_owner_without_a_device_is_named():
    with pytest.raises(PlanError, match=r"ranks \[3\]"):
        assign_receiver_ranks(numbered([0, 3]), {"l0": {8}}, {"r0": {0}})


@pytest.mark.parametrize("local", [{}, {"l0": set()}])
def test_nobody_to_receive_is_an_error(local: Topology):
    with pytest.raises(PlanError, match="no rank to receive"):
        assign_receiver_ranks(numbered([0]), local, {"r0": {0}})


def test_devices_of_one_name_on_two_hosts_are_two():
    metas = [
        RankMetas(rank=rank, host=host, device_id="", rdma_device=device, p2p_address="", buffers=())
        for rank, host, device in [(3, "b", "mlx5_1"), (2, "b", "mlx5_0"), (1, "a", "mlx5_0"), (0, "a", "mlx5_0")]
    ]
    assert topology_of(metas) == {"a/mlx5_0": {0, 1}, "b/mlx5_0": {2}, "b/mlx5_1": {3}}


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[tuple[int, int]], Topology, Topology]:
    def topology(prefix: str, first: int) -> Topology:
        sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
        starts = [first + sum(sizes[:index]) for index in range(len(sizes))]
        groups = zip(starts, sizes, strict=True)
        return {f"{prefix}{index}": set(range(start, start + size)) for index, (start, size) in enumerate(groups)}

    local, remote = topology("l", 100), topology("r", 0)
    owners = draw(st.lists(st.sampled_from(sorted(set().union(*remote.values()))), max_size=40))
    return [(owner, number) for number, owner in enumerate(owners)], local, remote


@given(cases())
def test_every_assignment_keeps_its_promises(case: tuple[list[tuple[int, int]], Topology, Topology]):
    buckets, local, remote = case
    assigned = assign_receiver_ranks(buckets, local, remote)
    device_of = {rank: device for device, ranks in remote.items() for rank in ranks}
    # Every bucket once, with its owner, and in order within a sender's device.
    assert sorted((owner, bucket) for _, owner, bucket in assigned) == sorted(buckets)
    for device in remote:
        numbers = [bucket for _, owner, bucket in assigned if device_of[owner] == device]
        assert numbers == sorted(numbers)
    receivers = sorted(min(ranks) for ranks in local.values())[: len(remote)]
    assert {receiver for receiver, _, _ in assigned} <= set(receivers)
    # Every round begins with the first receiver.
    rounds: list[list[tuple[int, int, int]]] = []
    for entry in assigned:
        if entry[0] == receivers[0]:
            rounds.append([])
        rounds[-1].append(entry)
    for position, one in enumerate(rounds):
        devices = [device_of[owner] for _, owner, _ in one]
        assert len(set(devices)) == len(devices)
        assert [receiver for receiver, _, _ in one] == receivers[: len(one)]
        # A round only ends early because the next bucket's device is busy, or all is assigned.
        if len(one) < len(receivers) and position + 1 < len(rounds):
            assert device_of[rounds[position + 1][0][1]] in devices
