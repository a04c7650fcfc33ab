"""A reward function that fails on too many samples ends the run, whoever asks it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.config.loader import load_config
from verl.trainer.ppo.experience import Experience
from verl.trainer.ppo.samples import SampleWriter
from verl.trainer.ppo.step import Step
from verl.trainer.ppo.validation import Validator
from verl.workers.reward_manager import Failures, RewardError, RewardOutput

CAUSE = "sample 0: its process was killed by signal 9"
ENDS = r"failed on {} of {} samples, more than reward_model.max_failed={} of them; first on " + CAUSE


def scores(count, failed):
    return RewardOutput(
        reward_tensor=torch.zeros(count, 2),
        responses=["x"] * count,
        extra_info={},
        abandoned=list(range(failed)),
        first_failure=CAUSE * bool(failed),
    )


def batch_of(count):
    names = {"data_source": ["s"] * count, "uid": list(range(count))}
    return DataProto.from_dict(
        tensors={name: torch.ones(count, 2) for name in ("responses", "attention_mask", "response_mask")},
        non_tensors={name: np.array(values, dtype=object) for name, values in names.items()},
    )


@pytest.mark.parametrize(
    ("parts", "most", "ends"),
    [
        ([(4, 2)], 0.5, False),
        ([(4, 3)], 0.5, True),
        ([(4, 4)], 1.0, False),
        ([(4, 1)], 0.0, True),
        ([(4, 0)], 0.0, False),
        ([(8, 0), (1, 1)], 0.5, False),
        ([(8, 4), (1, 1)], 0.5, True),
    ],
)
def test_the_share_counts_all_that_was_scored_in_a_step(parts, most, ends):
    now = Step(1, None)
    reward = [scores(*part) for part in parts]
    for part in reward[:-1]:
        assert now.counted(part, most) is part
    if not ends:
        now.counted(reward[-1], most)
        return
    total, failed = (sum(numbers) for numbers in zip(*parts, strict=True))
    with pytest.raises(RewardError, match=ENDS.format(failed, total, f"{most:g}")):
        now.counted(reward[-1], most)


@pytest.mark.parametrize("most", [0.5, 1.0])
def test_a_step_of_which_nothing_could_be_scored_ends_the_run(most, tmp_path):
    config = load_config([f"reward.max_failed={most}"])
    cluster = SimpleNamespace(actor=SimpleNamespace(world_size=1))
    experience = Experience(config, cluster, lambda batch: scores(len(batch), len(batch)), None, SampleWriter(None))
    now = Step(1, None)
    if most == 1.0:
        assert experience.score(batch_of(4), now) is not None
        assert now.metrics["reward/abandoned"] == 4
        return
    with pytest.raises(RewardError, match=ENDS.format(4, 4, 0.5)):
        experience.score(batch_of(4), now)


def test_a_validation_is_judged_as_a_whole():
    def validate(failed_of_batches):
        left = iter(failed_of_batches)
        rollouts = SimpleNamespace(
            generate_sequences=lambda prompts: batch_of(len(prompts)).select(non_tensor_batch_keys=[])
        )
        rows = [{"data_source": np.array(["s"] * 2, dtype=object)} for _ in failed_of_batches]
        validator = Validator(
            config=load_config([]),
            rollouts=rollouts,
            reward_manager=lambda batch: scores(len(batch), next(left)),
            dataloader=rows,
        )
        return validator.validate(1)

    assert validate([2, 0])["reward/val_abandoned"] == 2
    with pytest.raises(RewardError, match=ENDS.format(3, 4, 0.5)):
        validate([1, 2])


def test_the_first_failure_is_told_with_its_sample():
    failures = Failures()
    failures.add(scores(2, 0))
    failures.add(scores(2, 2))
    with pytest.raises(RewardError, match=CAUSE):
        failures.require(0.25)
