import pickle

import pytest

from verl.utils.config import ConfigError
from verl.utils.reward_score import default_compute_score, load_reward_function
from verl.workers.config import CustomRewardFunctionConfig

CODE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, bonus=0.0):
    return float(solution_str == ground_truth) + bonus

def too_few(data_source, solution_str):
    return 0.0

async def later(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0

constant = 1.0
"""


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(CODE)
    return lambda **keys: load_reward_function(CustomRewardFunctionConfig(path=str(path), **keys))


def test_without_a_path_the_built_in_rules_score():
    assert load_reward_function(CustomRewardFunctionConfig()) is default_compute_score


def test_a_users_function_scores_with_its_keyword_arguments(load):
    function = load(reward_kwargs={"bonus": 0.5})
    assert function(data_source="x", solution_str="1", ground_truth="1", extra_info={}) == 1.5


def test_a_users_function_travels_by_the_name_of_its_file(load):
    function = pickle.loads(pickle.dumps(load(reward_kwargs={"bonus": 0.5})))
    assert function(data_source="x", solution_str="1", ground_truth="1", extra_info={}) == 1.5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "compute_scores"}, "'compute_scores' is not defined in .*Did you mean 'compute_score'"),
        (
            {"name": "too_few"},
            r"too_few\(data_source, solution_str\) cannot take \(data_source, solution_str, ground_truth",
        ),
        ({"reward_kwargs": {"malus": 1}}, "cannot take .*malus"),
        ({"name": "constant"}, "is float, not a function"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_when_it_is_loaded(load, keys, message):
    with pytest.raises(ConfigError, match=message):
        load(**keys)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"custom_reward_function.path=/nowhere/reward.py: no such file"):
        load_reward_function(CustomRewardFunctionConfig(path="/nowhere/reward.py"))


def test_keyword_arguments_without_a_function_are_refused():
    with pytest.raises(ConfigError, match="reward_kwargs is set, but custom_reward_function.path is not"):
        load_reward_function(CustomRewardFunctionConfig(reward_kwargs={"bonus": 1}))


def test_a_name_without_a_file_is_refused():
    with pytest.raises(ConfigError, match="name=my_score is set, but custom_reward_function.path is not"):
        load_reward_function(CustomRewardFunctionConfig(name="my_score"))
