"""A rank among two that is slow is told from the one that waits for it."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.workers.engine.engine_cases import batch, make_engine
from tests.workers.engine.megatron_cases import make_megatron
from verl.trainer.ppo.slow_ranks import STEPS, SlowRanks
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.own_time import EventClock, HostClock, Own, OwnTime

SEQUENCES = 20
LONGER_S = 0.1
"""In each of its blocks."""
PHASE = "old_log_prob"


def computed(engine, steps):
    """What each step takes of this rank by itself."""
    own = OwnTime(HostClock())
    own.watch(engine.own_blocks())
    rows = batch(SEQUENCES, 1).chunk(2)[dist.get_rank()]
    found = []
    for _ in range(steps):
        with own.during(PHASE):
            engine.compute_log_prob(rows, temperature=1.0, limits=MicroBatchLimits(max_sequences=100))
        found.append(own.take())
    return found


def compute_beside_a_slow_rank(path):
    engine = make_engine(path)
    if dist.get_rank() == 1:
        for block in engine.own_blocks():
            next(block.children()).register_forward_pre_hook(lambda *_: time.sleep(LONGER_S))
    return computed(engine, 3 * STEPS)


def test_a_rank_that_takes_longer_is_named_though_the_others_wait_for_it(ranks, models, caplog):
    both = ranks.run(compute_beside_a_slow_rank, 2, models("qwen2", True))
    slow_ranks = SlowRanks(lambda rank: f"number {rank} of two")
    slowest = [slow_ranks.look(step)[f"trainer/slowest_rank/{PHASE}"] for step in zip(*both, strict=True)]
    assert sum(slowest) > len(slowest) / 2
    named = {record.getMessage().split(" is slow")[0] for record in caplog.records if record.levelname == "WARNING"}
    assert named == {"trainer rank 1 (number 1 of two)"}


def compute_with(make, path, options):
    (own,) = computed(make(path, **options), 1)
    return own


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (make_engine, {"strategy": "fsdp"}),
        (make_megatron, {"options": {"tensor_model_parallel_size": 2}}),
        (make_megatron, {"options": {}}),
    ],
    ids=["fsdp", "tensor parallel", "data parallel"],
)
def test_every_engine_tells_what_its_ranks_compute_by_themselves(ranks, models, make, options):
    one, other = ranks.run(compute_with, 2, make, models("qwen2", True), options)
    assert one.keys() == other.keys() == {PHASE}
    assert one[PHASE].tokens > 0
    assert one[PHASE].seconds > 0


def compute_outside_of_phases(path):
    engine = make_engine(path)
    own = OwnTime(HostClock())
    own.watch(engine.own_blocks())
    engine.compute_log_prob(batch(SEQUENCES, 1), temperature=1.0, limits=MicroBatchLimits(max_sequences=100))
    return own.take()


def test_what_is_in_no_phase_is_not_told(ranks, models):
    assert ranks.run(compute_outside_of_phases, 1, models("qwen2", True)) == [{}]


class Device:
    """It takes 2 ms for a token, after the call that asks for it has returned, and gets to marks in their order."""

    def __init__(self):
        self.asked, self.busy_ms, self.settled = [], 0.0, 0

    def event(self, device, *, enable_timing):
        assert (device, enable_timing) == ("some", True)
        return Mark(self)

    def compute(self, tokens):
        self.asked.append(tokens)

    def synchronize(self):
        self.settled += 1
        for asked in self.asked:
            if isinstance(asked, Mark):
                asked.at_ms = self.busy_ms
            else:
                self.busy_ms += 2.0 * asked
        self.asked = []


class Mark:
    at_ms = None

    def __init__(self, device):
        self._device = device

    def record(self):
        self._device.asked.append(self)

    def elapsed_time(self, later):
        return later.at_ms - self.at_ms  # fails unless the device has come to both


class Computing(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self._device = device

    def forward(self, tokens):
        self._device.compute(tokens.shape[0])
        return tokens


def test_a_device_that_computes_later_notes_the_time_itself_and_is_waited_for_once_a_step():
    device = Device()
    own = OwnTime(EventClock("some", event=device.event, synchronize=device.synchronize))
    block, another = Computing(device), Computing(device)
    own.watch([block])
    for _ in range(3):
        for phase, tokens in (("values", 5), ("update_actor", 50)):
            with own.during(phase):
                block(torch.zeros(tokens, 8))
                another(torch.zeros(1000, 8))  # which waits for others
        assert not device.settled
    assert own.take() == {"values": Own(pytest.approx(0.03), 15), "update_actor": Own(pytest.approx(0.3), 150)}
    assert device.settled == 1
    assert own.take() == {}
    assert device.settled == 1
