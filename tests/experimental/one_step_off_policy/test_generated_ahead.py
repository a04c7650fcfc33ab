"""The batch that a one-step-off run generated ahead, in a checkpoint and out of it."""

from __future__ import annotations

import io
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verl.experimental.one_step_off_policy.trainer import AHEAD, OneStepOffPolicyTrainer, Upcoming
from verl.protocol import DataProto
from verl.trainer.ppo.generation import Generation

POSITION = {"epoch": 0, "position": 8, "data": {"rows": 64}}


def prompts(*uids: str) -> DataProto:
    return DataProto.from_dict(non_tensors={"uid": np.array(uids, dtype=object)})


def responses(number: int, timing: dict[str, float]) -> DataProto:
    rows = DataProto.from_dict(
        {"responses": torch.full((2, 3), number), "rollout_log_probs": torch.rand(2, 3)},
        {"__replicas__": [[("replica-0", 0, 3)], [("replica-1", 0, 3)]], "__reward_score__": [None, 0.5]},
    )
    rows.meta_info["timing"] = timing
    return rows


class Engines:
    """In the place of `HealingRollouts`: notes what it shall generate."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def start(self, wanted: DataProto, keep: Any = None) -> Generation:
        self.asked.append(wanted.non_tensor_batch["uid"].tolist())
        return Generation.of(responses(9, {}))


def trainer(*, determined: bool = True) -> Any:
    """A trainer with what the batch ahead needs, and nothing else."""
    made: Any = object.__new__(OneStepOffPolicyTrainer)
    made.config = SimpleNamespace(trainer=SimpleNamespace(full_determinism=determined))
    made.rollouts = Engines()
    made.train_dataloader = SimpleNamespace(state_dict=lambda: dict(POSITION))
    made.sampling = SimpleNamespace(continue_after=lambda state: None, needs_greedy=False)
    return made


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """As `data.pt` of a checkpoint is read: plain values and tensors alone."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def saved(*, greedy: DataProto | None = None, determined: bool = True) -> tuple[Upcoming, dict[str, Any]]:
    generated = responses(4, {"agent_loop/total_s": 3.0, "agent_loop/tool_calls/mean": 2.0})
    ahead = Upcoming(
        3, prompts("a", "a"), Generation.of(generated), Generation.of(greedy) if greedy else None, dict(POSITION)
    )
    return ahead, through_a_file(trainer(determined=determined).state_before(ahead))


def test_a_resumed_run_learns_from_the_batch_of_the_checkpoint_and_not_from_another():
    ahead, state = saved()
    resumed = trainer()
    resumed.restore_prompts(state)
    found = resumed.start_next(iter([(3, prompts("a", "a")), (4, prompts("b", "b"))]))
    assert resumed.rollouts.asked == []
    assert found.end.done()
    ours, theirs = ahead.generation.result(), found.generation.result()
    for name, tensor in ours.batch.items():
        assert torch.equal(theirs.batch[name], tensor)
    for name, column in ours.non_tensor_batch.items():
        assert theirs.non_tensor_batch[name].tolist() == column.tolist()
    assert resumed.start_next(iter([(4, prompts("b", "b"))])).step == 4
    assert resumed.rollouts.asked == [["b", "b"]], "only the first batch came with the checkpoint"


def test_what_was_measured_is_not_in_a_checkpoint():
    _, state = saved()
    resumed = trainer()
    resumed.restore_prompts(state)
    found = resumed.start_next(iter([(3, prompts("a", "a"))])).generation.result()
    assert found.meta_info["timing"] == {"agent_loop/tool_calls/mean": 2.0}


def test_greedy_responses_come_with_the_others():
    _, state = saved(greedy=responses(7, {}))
    resumed = trainer()
    resumed.restore_prompts(state)
    found = resumed.start_next(iter([(3, prompts("a", "a"))]))
    assert found.greedy.result().batch["responses"].unique().tolist() == [7]


@pytest.mark.parametrize("uids", [("b", "b"), ("a", "a", "a"), ("a",)])
def test_a_batch_of_other_prompts_is_generated(uids: tuple[str, ...], caplog: pytest.LogCaptureFixture):
    _, state = saved()
    resumed = trainer()
    resumed.restore_prompts(state)
    resumed.start_next(iter([(3, prompts(*uids))]))
    assert resumed.rollouts.asked == [list(uids)]
    assert "is of other prompts" in caplog.text


def test_without_full_determinism_a_checkpoint_has_the_position_alone():
    _, state = saved(determined=False)
    assert state == POSITION
    assert AHEAD not in trainer().state_before(None)


def test_going_back_to_a_state_without_a_batch_forgets_the_one_of_another():
    _, state = saved()
    resumed = trainer()
    resumed.restore_prompts(state)
    resumed.restore_prompts(POSITION)
    resumed.start_next(iter([(1, prompts("a", "a"))]))
    assert resumed.rollouts.asked == [["a", "a"]]


def test_a_generation_that_is_over_is_a_generation():
    over = Generation.of(responses(1, {}))
    assert isinstance(over.future, Future)
    over.abandon()
    assert over.result() is over.result()
