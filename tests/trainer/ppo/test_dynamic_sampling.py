import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.dynamic_sampling import DynamicBatch, TooFewGroups, metric_values
from verl.workers.reward_manager import RewardError, RewardOutput


def generated(groups, first=0, **extra_info):
    """(batch, reward) of two responses a group, with those scores; uids count from `first`, tokens too."""
    scores = [score for group in groups for score in group]
    uids = [f"u{first + number}" for number, group in enumerate(groups) for _ in group]
    tokens = torch.arange(len(scores)).unsqueeze(-1) + 100 * first
    batch = DataProto.from_dict({"responses": tokens}, {"uid": np.array(uids, dtype=object)})
    return batch, RewardOutput(
        reward_tensor=torch.tensor(scores).unsqueeze(-1),
        responses=[f"{uid}: {score}" for uid, score in zip(uids, scores, strict=True)],
        extra_info=extra_info,
    )


def filling(**options):
    return DynamicBatch(**{"metric": "score", "wanted": 2, "max_batches": 2, **options})


def test_groups_whose_responses_all_earn_the_same_are_left_out():
    batch = filling()
    batch.add(*generated([(1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0), (0.5, 0.0)]))
    assert batch.is_full
    kept, reward = batch.result()
    assert kept.non_tensor_batch["uid"].tolist() == ["u1", "u1", "u3", "u3"]  # a third differs, and two are wanted
    assert kept.batch["responses"].flatten().tolist() == [2, 3, 6, 7]
    assert reward.reward_tensor.flatten().tolist() == [0.0, 1.0, 1.0, 0.0]
    assert reward.responses == ["u1: 0.0", "u1: 1.0", "u3: 1.0", "u3: 0.0"]
    assert batch.metrics == {
        "train/num_gen_batches": 1,
        "filter_groups/drawn": 5,
        "filter_groups/differing": 3,
    }


def test_a_batch_is_filled_from_several_draws():
    batch = filling(metric="acc")
    batch.add(*generated([(1.0, 1.0), (0.0, 1.0)], acc=[True, True, False, True]))
    assert not batch.is_full
    batch.add(*generated([(3.0, 2.0)], first=7, acc=[0, 1], length=[8, 9]))
    kept, reward = batch.result()
    assert kept.non_tensor_batch["uid"].tolist() == ["u1", "u1", "u7", "u7"]
    assert reward.extra_info == {"acc": [False, True, 0, 1], "length": [None, None, 8, 9]}


def test_what_was_abandoned_is_still_told_by_its_place():
    batch = filling(wanted=1)
    samples, reward = generated([(1.0, 1.0), (1.0, 0.0)])
    reward.abandoned.extend([0, 3])
    batch.add(samples, reward)
    assert batch.result()[1].abandoned == [1]


def test_a_step_that_does_not_fill_ends_with_the_counts():
    batch = filling()
    batch.add(*generated([(1.0, 1.0), (0.0, 1.0)]))
    with pytest.raises(TooFewGroups, match="1 of 3 prompts have responses that differ .* after 2 batches, .* needs 2"):
        batch.add(*generated([(1.0, 1.0)], first=9))


def test_the_only_response_to_a_prompt_is_kept():
    batch = filling(wanted=1)
    batch.add(*generated([(1.0,)]))
    assert batch.is_full


def test_a_function_that_returns_a_score_alone_has_it_as_acc():
    _, reward = generated([(1.0, 0.0)])
    assert metric_values(reward, "acc") == metric_values(reward, "seq_reward") == [1.0, 0.0]


def test_the_metric_reward_is_what_is_learned_from_whatever_the_function_calls_so():
    _, reward = generated([(1.0, 0.0)], reward=[0.5, 0.5])
    assert metric_values(reward, "reward") == [1.0, 0.0]


@pytest.mark.parametrize("extra", [{}, {"f1": [0.5, None]}, {"f1": [0.5, float("nan")]}, {"f1": ["a", "b"]}], ids=str)
def test_a_metric_that_no_response_has_is_named(extra):
    _, reward = generated([(1.0, 0.0)], **extra)
    with pytest.raises(RewardError, match=r"filter_groups.metric=f1 is no number of every response; there is"):
        metric_values(reward, "f1")
