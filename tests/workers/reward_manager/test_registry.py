"""Reward managers written for verl."""

import asyncio

import pytest
import torch

from tests.workers.reward_manager.test_naive import TOKENIZER, make_batch
from verl.utils.config import ConfigError
from verl.workers.reward_manager import (
    AbstractRewardManager,
    NaiveRewardManager,
    OwnRewardManager,
    RewardError,
    RewardManagerBase,
    get_reward_manager_cls,
    register,
)


@register("written_for_verl")
class LengthManager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", **kwargs):
        self.compute_score = compute_score
        self.tokenizer, self.key = tokenizer, reward_fn_key

    def __call__(self, data, return_dict=False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for i in range(len(data)):
            item = data[i]
            length = int(item.batch["attention_mask"][-item.batch["responses"].shape[-1] :].sum())
            rewards[i, length - 1] = self.compute_score(
                data_source=item.non_tensor_batch[self.key],
                solution_str=self.tokenizer.decode(item.batch["responses"][:length], skip_special_tokens=True),
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=item.non_tensor_batch.get("extra_info", {}),
            )
        return {"reward_tensor": rewards, "reward_extra_info": {"row": list(range(len(data)))}}


def score_by_length(*, solution_str, **_):
    return float(len(solution_str))


def manager(name):
    return OwnRewardManager(name, TOKENIZER, score_by_length, "data_source")


def test_a_registered_manager_takes_the_place_of_the_projects():
    with manager("written_for_verl") as own:
        output = own(make_batch(["1", "22"]))
    assert output.reward_tensor.sum(-1).tolist() == [1.0, 2.0]
    assert (output.responses, output.extra_info) == (["1", "22"], {"row": [0, 1]})
    assert get_reward_manager_cls("naive") is NaiveRewardManager


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned NoneType, not finite rewards"),
        (torch.zeros(2), r"returned a tensor \[2\], not finite rewards"),
        (torch.tensor(float("nan")), "not finite rewards"),
    ],
)
def test_what_is_no_reward_per_token_is_named(returned, message):
    class Wrong(LengthManager):
        def __call__(self, data, return_dict=False):
            return returned

    own = manager("written_for_verl")
    own._manager = Wrong(TOKENIZER, 0)
    with pytest.raises(RewardError, match=message):
        own(make_batch(["1", "22"]))


def test_what_a_manager_raises_is_named_with_it():
    own = OwnRewardManager("written_for_verl", TOKENIZER, None, "data_source")
    with pytest.raises(RewardError, match="reward_manager=written_for_verl raised TypeError"):
        own(make_batch(["1"]))


@register("takes_a_list")
class TakesAList(LengthManager):
    def __call__(self, samples): ...


@register("wants_config")
class WantsConfig(LengthManager):
    def __init__(self, config): ...


@pytest.mark.parametrize("name", ["takes_a_list", "wants_config", "unknown"])
def test_a_manager_that_cannot_be_used_is_an_error_of_the_configuration(name):
    with pytest.raises(ConfigError, match=f"reward_model.reward_manager='?{name}.*(cannot take|not registered)"):
        get_reward_manager_cls(name)


def test_a_loop_that_knows_the_reward_is_believed_and_its_fields_reach_the_function():
    def compute_score(*, extra_info, **_):
        return {"score": 1.0, "turns": extra_info["num_turns"], "tool": extra_info["rollout_reward_scores"]["check"]}

    batch = make_batch(["1", "22"])
    batch.non_tensor_batch |= {
        "__num_turns__": [4, 2],
        "__extra_fields__": [{"reward_scores": {"check": 0.5}}, {}],
        "__reward_score__": [None, 0.25],
    }
    output = NaiveRewardManager(TOKENIZER, compute_score)(batch)
    assert output.reward_tensor.sum(-1).tolist() == [1.0, 0.25]
    assert output.extra_info == {"turns": [4, None], "tool": [0.5, None]}


@register("one_by_one")
class Single(RewardManagerBase):
    async def run_single(self, data):
        assert len(data) == 1
        await asyncio.sleep(0)
        item = data[0]
        length = int(item.batch["attention_mask"][-item.batch["responses"].shape[-1] :].sum())
        text = self.tokenizer.decode(item.batch["responses"][:length], skip_special_tokens=True)
        score = self.compute_score(solution_str=text)
        return {"reward_score": score, "reward_extra_info": {"text": text} if score > 1 else {}}


def test_a_manager_of_verl_s_reward_loop_scores_every_sample():
    with manager("one_by_one") as own:
        output = own(make_batch(["1", "22"]))
    assert output.reward_tensor.sum(-1).tolist() == [1.0, 2.0]
    assert output.extra_info == {"text": [None, "22"]}


def test_a_result_without_a_score_is_named():
    class Silent(Single):
        async def run_single(self, data):
            return {"reward_extra_info": {}}

    with manager("one_by_one") as own:
        own._manager._manager = Silent(None, TOKENIZER, None)
        with pytest.raises(RewardError, match="reward_manager=one_by_one raised KeyError: 'reward_score'"):
            own(make_batch(["1"]))
