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


class Rows(list):
    """Batches of two prompts."""

    @property
    def num_prompts(self):
        return 2 * len(self)


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
    tensors = {name: torch.ones(count, 2) for name in ("responses", "attention_mask", "response_mask")}
    return DataProto.from_dict(
        tensors={**tensors, "prompts": torch.ones(count, 0)},
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

    def score(count, failed):
        return now.scored(lambda batch, _: scores(len(batch), failed), batch_of(count), most)

    for part in parts[:-1]:
        assert len(score(*part).responses) == part[0]
    if not ends:
        score(*parts[-1])
        return
    total, failed = (sum(numbers) for numbers in zip(*parts, strict=True))
    beyond = failed if most == 0.0 else int(most * total) + 1
    with pytest.raises(RewardError, match=ENDS.format(beyond, total, f"{most:g}")):
        score(*parts[-1])


@pytest.mark.parametrize(("before", "asked"), [((), 3), (((2, 0),), 4), (((4, 2),), 3)])
def test_scoring_ends_as_soon_as_too_many_have_surely_failed(before, asked):
    """Of what may fail, others before in the step have taken none, or some."""
    now, told = Step(1, None), []
    for count, failed in before:
        now.scored(lambda batch, _, failed=failed: scores(len(batch), failed), batch_of(count), 0.5)

    def hanging(batch, given_up):
        for position in range(len(batch)):
            told.append(position)
            given_up(f"sample {position}: its process was killed by signal 9")
        raise AssertionError("it went on to the end")

    with pytest.raises(RewardError, match="max_failed=0.5 of them"):
        now.scored(hanging, batch_of(4), 0.5)
    assert len(told) == asked


@pytest.mark.parametrize("most", [0.5, 1.0])
def test_a_step_of_which_nothing_could_be_scored_ends_the_run(most, tmp_path):
    config = load_config([f"reward.max_failed={most}"])
    cluster = SimpleNamespace(actor=SimpleNamespace(world_size=1))
    experience = Experience(config, cluster, lambda batch, _: scores(len(batch), len(batch)), None, SampleWriter(None))
    now = Step(1, None)
    if most == 1.0:
        assert experience.score(batch_of(4), now) is not None
        assert now.metrics["reward/abandoned"] == 4
        return
    with pytest.raises(RewardError, match=ENDS.format(3, 4, 0.5)):
        experience.score(batch_of(4), now)


def test_a_validation_is_judged_as_a_whole():
    def validate(failed_of_batches):
        left = iter(failed_of_batches)
        rollouts = SimpleNamespace(
            generate_sequences=lambda prompts: batch_of(len(prompts)).select(non_tensor_batch_keys=[])
        )
        rows = Rows({"data_source": np.array(["s"] * 2, dtype=object)} for _ in failed_of_batches)
        validator = Validator(
            config=load_config([]),
            rollouts=rollouts,
            reward_manager=lambda batch, _: scores(len(batch), next(left)),
            dataloader=rows,
        )
        return validator.validate(1)

    assert validate([2, 0])["reward/val_abandoned"] == 2
    with pytest.raises(RewardError, match=ENDS.format(3, 4, 0.5)):
        validate([1, 2])


def test_the_first_failure_is_told_with_its_sample():
    failures = Failures(0.25)
    failures.score(lambda _batch, _: scores(2, 0), batch_of(2))
    with pytest.raises(RewardError, match=CAUSE):
        failures.score(lambda _batch, _: scores(2, 2), batch_of(2))
