"""Groups whose rewards are equal teach nothing, whatever rounding makes of their spread."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.dynamic_sampling import DynamicBatch
from verl.workers.reward_manager import RewardOutput


@pytest.mark.parametrize("size", [2, 3, 5, 10])
def test_no_group_of_equal_rewards_is_kept(size: int) -> None:
    """The standard deviation of three times 0.7 is 1e-16."""
    for hundredths in range(1, 100):
        values = [hundredths / 100] * size + [0.0] * (size - 1) + [1.0]
        uids = np.array(["equal"] * size + ["differing"] * size, dtype=object)
        batch = DataProto.from_dict(
            tensors={"responses": torch.zeros(2 * size, 1, dtype=torch.long)}, non_tensors={"uid": uids}
        )
        reward = RewardOutput(
            reward_tensor=torch.zeros(2 * size, 1),
            responses=[""] * (2 * size),
            extra_info={"acc": values},
            abandoned=[],
        )
        assert DynamicBatch(metric="acc", wanted=2, max_batches=9).add(batch, reward) == {"differing"}
