"""What a command says of a reward of the user's own that fails: one line, whichever way rewards are computed."""

import pytest
from ray.exceptions import RayTaskError

from tests.workers.reward_manager.test_naive import TOKENIZER, make_batch
from verl.experimental.agent_loop.errors import AgentCodeError
from verl.trainer.config.cli import run_hydra
from verl.utils.failures import in_one_line
from verl.utils.reward_score.served import AskedFunction, ScoredByModel
from verl.utils.user_code import UserCodeError
from verl.workers.reward_manager import (
    AbstractRewardManager,
    NaiveRewardManager,
    OwnRewardManager,
    RewardManagerBase,
    register,
)


def raising(**_):
    raise ValueError("no\n  score")


async def raising_later(**_):
    raising()


class Raising:
    def __call__(self, **_):
        raising()


def returning_text(**_):
    return "no\n  score"


def asking(*, reward_router_address, solution_str, data_source, ground_truth, extra_info):
    raise ConnectionError(f"nobody at\n  {reward_router_address}")


@register("raises")
class RaisingManager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source"): ...

    def __call__(self, data, return_dict=False):
        raising()


@register("raises_one_by_one")
class RaisingSingle(RewardManagerBase):
    async def run_single(self, data):
        raising()


def of_function(function):
    def score(_):
        batch = make_batch(["1"])
        batch.non_tensor_batch["raw_prompt"] = [[{"role": "user", "content": "1 * 1"}]]
        with NaiveRewardManager(TOKENIZER, function, shows_prompts=True) as manager:
            manager(batch)

    return score


def of_manager(name):
    def score(_):
        with OwnRewardManager(name, TOKENIZER, raising, "data_source") as manager:
            manager(make_batch(["1"]))

    return score


def of_model(make):
    """With an address at which nobody is."""

    def score(folder):
        (folder / "addresses").write_text('["127.0.0.1:1"]')
        of_function(make(folder / "addresses"))(folder)

    return score


def known_to_the_loop(_):
    batch = make_batch(["1"])
    batch.non_tensor_batch["__reward_score__"] = [float("nan")]
    NaiveRewardManager(TOKENIZER, raising)(batch)


def in_the_loop(_):
    """As Ray hands it on."""
    failed = AgentCodeError("sample 0: agent loop 'own' failed: ValueError: no\n  score")
    raise RayTaskError("run", "Traceback of the loop", failed).as_instanceof_cause()


WAYS = {
    "a function": (of_function(raising), "the reward function raised ValueError: no score on sample 0"),
    "an async function": (of_function(raising_later), "the reward function raised ValueError: no score on sample 0"),
    "an object": (of_function(Raising()), "the reward function raised ValueError: no score on sample 0"),
    "no number": (of_function(returning_text), "the reward function returned no score instead of a finite number"),
    "a manager": (of_manager("raises"), "reward_model.reward_manager=raises raised ValueError: no score"),
    "one by one": (of_manager("raises_one_by_one"), "reward_manager=raises_one_by_one raised ValueError: no score"),
    "a function that asks a model": (
        of_model(lambda addresses: AskedFunction(asking, addresses, "")),
        "the reward function raised ConnectionError: nobody at 127.0.0.1:1 on sample 0",
    ),
    "a model with a head": (
        of_model(lambda addresses: ScoredByModel(addresses, 60)),
        "the reward function raised RewardModelError: ",
    ),
    "what a loop returns": (known_to_the_loop, "the agent loop returned reward_score=nan on sample 0"),
    "what a loop raises": (in_the_loop, "sample 0: agent loop 'own' failed: ValueError: no score"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_reward_that_fails_can_be_told_in_one_line(way, tmp_path):
    score, said = WAYS[way]
    with pytest.raises(UserCodeError) as caught:
        score(tmp_path)
    assert said in in_one_line(caught.value)


def test_a_command_tells_what_a_loop_raises_without_the_tracebacks_of_ray(capsys, monkeypatch):
    monkeypatch.delenv("VERL_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as caught:
        run_hydra(in_the_loop, [])
    assert caught.value.code == 1
    said = "error: sample 0: agent loop 'own' failed: ValueError: no score (VERL_TRACEBACK=1 shows where)\n"
    assert capsys.readouterr().err == said
