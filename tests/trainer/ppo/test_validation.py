from types import SimpleNamespace

import numpy as np
import torch

from tests.trainer.ppo.test_failed_scores import Rows, batch_of
from verl.trainer.config.loader import load_config
from verl.trainer.ppo.validation import Validator
from verl.workers.reward_manager import RewardOutput


def test_each_prompt_is_sampled_as_val_kwargs_say_and_has_statistics_of_its_own_responses():
    asked = []

    def generated(prompts):
        asked.append(prompts.meta_info)
        batch = batch_of(len(prompts)).select(non_tensor_batch_keys=[])
        batch.non_tensor_batch["__num_turns__"] = np.arange(2, 2 + len(prompts))
        return batch

    def scored(batch, _):
        rewards = torch.zeros(len(batch), 2)
        rewards[:, 0] = torch.tensor(batch.non_tensor_batch["level"].astype(float)) * 10
        rewards[1::2, 1] = 1  # the second response of a prompt is better
        return RewardOutput(
            reward_tensor=rewards, responses=["x"] * len(batch), extra_info={}, abandoned=[], first_failure=""
        )

    sources = np.array(["a", "b"], dtype=object)
    validator = Validator(
        config=load_config(["actor_rollout_ref.rollout.val_kwargs.n=2"]),
        rollouts=SimpleNamespace(generate_sequences=generated),
        reward_manager=scored,
        dataloader=Rows({"data_source": sources, "level": np.array(levels)} for levels in ([1, 2], [3, 6])),
    )
    metrics = validator.validate(7)
    assert asked == [{"validate": True, "global_steps": 7}] * 2
    names = [f"val-{kind}@2" for kind in ("core/a/reward/mean", "core/b/reward/mean", "aux/a/reward/std")]
    assert [metrics[name] for name in names] == [20.5, 40.5, 0.5]
    assert [metrics[f"val-aux/num_turns/{name}"] for name in ("min", "max", "mean")] == [2, 5, 3.5]
