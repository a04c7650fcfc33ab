"""Full or delta: the arithmetic of the choice, and what a job learns from its syncs."""

from __future__ import annotations

import numpy as np
import pytest

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.plan.delta_choice import (
    DeltaReport,
    Rates,
    bits_per_change,
    predict,
    prefers_delta,
    rate_without_changes,
)
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import SyncPlan, make_plan
from verl.checkpoint_engine.plan.types import Box, Shard, TensorSpec
from verl.checkpoint_engine.sync.delta_policy import DeltaPolicy

GIB = 2**30
GBIT = 1e9 / 8


def plan_of(rows: int) -> SyncPlan:
    layout = Layout.of([TensorSpec(name="w", shape=(rows, 2**20), dtype="bfloat16")])
    return make_plan(layout, [ShardTable.of(layout, [Shard("w", Box((0, 0), (rows, 2**20)))])], block_nbytes=2**21)


@pytest.mark.parametrize(
    ("link", "fraction", "expected"),
    [
        (1 * GBIT, 0.001, True),
        (1 * GBIT, 0.05, True),
        (1 * GBIT, 1.0, False),  # what every change costs is more than its bits save
        (0.1 * GBIT, 1.0, True),
        (2.5 * GBIT, 0.01, True),
        (10 * GBIT, 0.01, False),  # of slow cores: looking takes longer than sending
        (400 * GBIT, 0.001, False),
    ],
)
def test_a_delta_is_preferred_where_the_link_is_slower_than_looking(link: float, fraction: float, expected: bool):
    predicted = predict(Rates(link=link), nbytes=GIB, owner_nbytes=GIB // 2, fraction=fraction, word_nbytes=2)
    assert prefers_delta(predicted, was_delta=False) is expected


def test_the_way_in_use_stays_until_the_other_is_faster_by_a_tenth():
    predicted = predict(Rates(link=5 * GBIT), nbytes=GIB, owner_nbytes=GIB, fraction=0.0, word_nbytes=2)
    cases = ((0.85, False, False), (0.95, False, True), (1.05, False, True), (1.2, True, True))
    for full_s, if_full, if_delta in cases:
        other = type(predicted)(full_s=full_s, delta_s=1.0)
        assert prefers_delta(other, was_delta=False) is if_full
        assert prefers_delta(other, was_delta=True) is if_delta


def test_nobody_looks_for_less_than_two_hundredths_of_a_second():
    predicted = predict(Rates(link=GBIT), nbytes=2**20, owner_nbytes=2**20, fraction=0.0, word_nbytes=2)
    assert not prefers_delta(predicted, was_delta=False)


def test_bits_fall_as_more_changes():
    assert bits_per_change(0.001) > bits_per_change(0.01) > bits_per_change(0.1) > 3
    assert np.isfinite([bits_per_change(0.0), bits_per_change(1.0)]).all()


def test_two_syncs_are_full_and_the_third_is_left_to_owners_if_the_link_was_slow():
    plan = plan_of(64)
    policy = DeltaPolicy(CheckpointEngineConfig.from_mapping({"backend": "tcp"}), possible=True)
    assert policy.request(None, plan, across_hosts=True) is None
    assert policy.request(0, plan, across_hosts=True) is None  # nothing has been measured
    policy.learn(plan, {"publish": 1.0, "stage": 9.0, "verify": 0.5}, None)
    assert policy.request(1, plan, across_hosts=True) is None  # a first sync says nothing
    policy.learn(plan, {"publish": 0.1, "stage": 1.0, "verify": 0.05}, None)
    request = policy.request(1, plan, across_hosts=True)
    assert request is not None
    assert (request.base, request.always, request.rates.link) == (1, False, plan.layout.payload_nbytes)
    assert policy.request(1, plan, across_hosts=False) is None


def test_a_slow_sync_with_deltas_is_not_the_last_one():
    plan = plan_of(64)
    policy = DeltaPolicy(CheckpointEngineConfig.from_mapping({"backend": "tcp"}), possible=True)
    full = {"publish": 0.1, "stage": 1.0, "verify": 0.05}
    policy.learn(plan, full, None)
    policy.learn(plan, full, None)
    slow = DeltaReport(way="delta", base=0, changed_fraction=0.01, encode_s=20.0, apply_s=20.0)
    policy.learn(plan, full, slow)
    policy.learn(plan, full, None)
    turns = 0
    while policy.request(1, plan, across_hosts=True) is None:
        policy.learn(plan, full, None)
        turns += 1
        assert turns < 50
    assert turns > 0


@pytest.mark.parametrize("delta", ["off", "auto", "always"])
def test_what_is_not_verified_is_sent_in_full(delta: str):
    config = CheckpointEngineConfig.from_mapping({"backend": "tcp", "delta": delta, "verify": False})
    policy = DeltaPolicy(config, possible=True)
    policy.learn(plan_of(64), {"publish": 0.1, "stage": 10.0, "verify": 0.0}, None)
    assert policy.request(1, plan_of(64), across_hosts=True) is None


def test_one_of_so_many_syncs_is_full_if_that_is_asked_for():
    config = CheckpointEngineConfig.from_mapping({"backend": "tcp", "delta": "always", "delta_full_every": 3})
    policy, plan = DeltaPolicy(config, possible=True), plan_of(64)
    phases, ways = {"publish": 0.1, "stage": 1.0, "verify": 0.05}, []
    for version in range(7):
        request = policy.request(version - 1 if version else None, plan, across_hosts=True)
        ways.append("full" if request is None else "delta")
        report = None if request is None else DeltaReport(way="delta", base=version - 1, changed_fraction=0.01)
        policy.learn(plan, phases, report)
    assert ways == ["full", "delta", "delta", "full", "delta", "delta", "full"]


def test_what_changes_cost_is_no_part_of_a_rate():
    assert rate_without_changes(1e9, 1.0, 0, 1e-8) == pytest.approx(1e9)
    assert rate_without_changes(1e9, 1.0, 5e7, 1e-8) == pytest.approx(2e9)
    assert rate_without_changes(1e9, 1.0, 1e9, 1e-8) == pytest.approx(5e9)  # and never all of the time
    assert rate_without_changes(1e9, 0.0, 0, 1e-8) == 0
