"""Sequences that do not divide over the ranks: padding that nothing counts."""

import numpy as np
import torch
import torch.distributed as dist

from tests.workers.engine.engine_cases import (
    assemble,
    assert_same_weights,
    batch,
    held_parts,
    make_engine,
    weighted_loss,
)
from tests.workers.engine.rank_pool import RankPool
from verl.trainer.ppo.advantages import compute_grpo_outcome_advantage
from verl.trainer.ppo.even_batches import padded, without_padding
from verl.utils.builtin import make_tiny_model
from verl.workers.engine.micro_batches import MicroBatchLimits

LIMITS = MicroBatchLimits(max_sequences=2)


def scored(count):
    data = batch(count)
    data.batch["token_level_scores"] = data.batch["response_mask"].float()
    data.non_tensor_batch["uid"] = np.array([f"prompt-{index // 2}" for index in range(count)], dtype=object)
    return data


def test_a_batch_is_padded_to_a_multiple_of_the_ranks_and_comes_back_in_whatever_order():
    data = scored(7)
    larger = padded(data, 3)
    assert len(larger) == 9
    assert larger.batch["response_mask"][7:].sum() == 0
    assert larger.batch["token_level_scores"][7:].sum() == 0
    assert list(larger.non_tensor_batch["uid"][6:]) == ["prompt-3", "padding-0", "padding-1"]
    larger.reorder(torch.tensor([8, 6, 5, 7, 4, 3, 2, 1, 0]))
    back = without_padding(larger)
    assert list(back.non_tensor_batch["uid"]) == list(reversed(data.non_tensor_batch["uid"]))
    assert torch.equal(back.batch["responses"], data.batch["responses"].flip(0))


def test_a_batch_that_divides_stays_what_it_is():
    data = scored(6)
    assert padded(data, 3) is data
    assert without_padding(data) is data


def test_advantages_do_not_see_the_padding():
    data = scored(4)
    larger = padded(data, 3)
    found, expected = (
        compute_grpo_outcome_advantage(
            token_level_rewards=each.batch["token_level_scores"],
            response_mask=each.batch["response_mask"],
            index=each.non_tensor_batch["uid"],
        )[0]
        for each in (larger, data)
    )
    assert torch.equal(found[:4], expected)
    assert found[4:].abs().sum() == 0


def one_step(path, data):
    engine = make_engine(path)
    mine = data.chunk(dist.get_world_size())[dist.get_rank()]
    engine.train_mini_batch(mine, weighted_loss, temperature=0.7, limits=LIMITS)
    engine.step_lr()
    return held_parts(engine)


def test_three_ranks_learn_from_seven_sequences_what_one_does(tmp_path):
    path = make_tiny_model(tmp_path / "model", hidden_size=16, heads=2, head_dim=8)
    ranks = RankPool(3)
    try:
        alone = ranks.run(one_step, 1, path, scored(7))
        together = ranks.run(one_step, 3, path, padded(scored(7), 3))
    finally:
        ranks.close()
    assert_same_weights(assemble(together), assemble(alone))
