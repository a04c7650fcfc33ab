"""Seconds by hand: fair shares of links, transfers that end one after the other, phases, hops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from verl.checkpoint_engine.plan.delta_choice import APPLY_S, ENCODE_S, bits_per_change
from verl.planning import cost
from verl.planning.cost import Flow, Rates, drained, max_min

RATES = Rates(
    copy=4.0,
    digest=8.0,
    encode=2.0,
    apply=5.0,
    to_host=10.0,
    load=20.0,
    wire_share=1.0,
    process=1e9,
    message_s=0.0,
    tensor_s=0.1,
    call_s=0.5,
    member_s=0.25,
    threads=2,
)


def test_flows_share_a_link_evenly_and_by_connections():
    ways = np.array([[0], [0]])
    assert max_min(ways, np.ones(2), np.array([10.0])).tolist() == [5.0, 5.0]
    assert max_min(ways, np.array([3.0, 1.0]), np.array([10.0])).tolist() == [7.5, 2.5]


def test_what_one_flow_cannot_use_is_for_the_others():
    # Flow 0 crosses links 0 and 1, flow 1 link 0 alone; link 1 carries 2.
    rates = max_min(np.array([[0, 1], [0, 2]]), np.ones(2), np.array([10.0, 2.0, np.inf]))
    assert rates.tolist() == pytest.approx([2.0, 8.0])


def test_a_flow_without_a_limit_has_none():
    assert max_min(np.array([[0]]), np.ones(1), np.array([np.inf])).tolist() == [np.inf]


def test_shares_are_dealt_anew_when_a_transfer_ends():
    # Both at 5 until 10 bytes are through at 2 s; the 20 that are left then have the link alone.
    flows = [Flow(nbytes=10, resources=("link",)), Flow(nbytes=30, resources=("link",))]
    assert drained(flows, {"link": 10.0}).tolist() == pytest.approx([2.0, 4.0], rel=0.02)


def test_a_transfer_without_a_limit_takes_no_time_beside_one_that_has_one():
    flows = [Flow(nbytes=10, resources=()), Flow(nbytes=30, resources=("link",))]
    assert drained(flows, {"link": 10.0}).tolist() == [0.0, 3.0]


def test_nothing_takes_no_time():
    assert drained([Flow(nbytes=0, resources=("link",))], {"link": 1.0}).tolist() == [0.0]


def test_links_between_switches_limit_what_crosses_them():
    flows = [Flow(nbytes=10, resources=(("out", host), ("up", 0))) for host in range(4)]
    capacity = {("out", host): 10.0 for host in range(4)} | {("up", 0): 20.0}
    assert drained(flows, capacity).max() == pytest.approx(2.0)


def test_phases_by_hand():
    assert cost.publish_s(40, RATES) == 5.0  # 2 threads at 4
    assert cost.publish_s(40, replace(RATES, threads=8)) == 4.0  # the device gives 10
    assert cost.verify_s(160, RATES) == 10.0
    assert cost.calls_s(6, RATES) == 2.0
    assert cost.activate_s(100, 10, RATES) == 5.0
    assert cost.activate_s(100, 100, RATES) == 10.0
    assert cost.pipeline_s(3, 10, 5.0, RATES) == 12.0  # two parts of 2 s a hop


def test_deltas_by_hand():
    moved = cost.moved_part(0.01, 2.0)
    assert moved == pytest.approx(0.01 * bits_per_change(0.01) / 16)
    assert cost.moved_part(1.0, 2.0) <= 1.0
    assert cost.publish_delta_s(80, 0.01, 2.0, RATES) == pytest.approx((40 + 0.4 * ENCODE_S) / 2)
    assert cost.apply_s(80, 0.01, 2.0, RATES) == pytest.approx(8 + 0.4 * APPLY_S)
