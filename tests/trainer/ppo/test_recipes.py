"""Recipes as people write them for verl: each works, or ends where it says so, with a line that names what to write."""

import sys

import pytest
from hydra import compose, initialize_config_dir

from verl.trainer.config.loader import CONFIG_DIR
from verl.trainer.main_ppo import check_ppo, run_ppo
from verl.trainer.ppo import core_algos, ray_trainer
from verl.utils.config import ConfigError
from verl.workers.reward_manager import get_reward_manager_cls

PATH = "docs/coming-from-verl.md"
TRAINER = "from verl.trainer.ppo.ray_trainer import RayPPOTrainer\nclass Mine(RayPPOTrainer):\n"
REFUSED = {
    "a loop of its own": (
        TRAINER + "    def fit(self):\n        for batch in self.train_dataloader: ...",
        "Mine is written for verl's RayPPOTrainer. fit(self): it is fit(self, resume_from) here",
    ),
    "a validation of its own": (
        TRAINER + "    def _validate(self, merged=False):\n        return {'val/mine': 1.0}",
        "_validate: override validate(now)",
    ),
    "advantages of its own, imported": (
        "from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage",
        "verl's compute_advantage is not in verl.trainer.ppo.ray_trainer here: register an estimator with",
    ),
    "advantages of its own, as a method": (
        TRAINER + "    def compute_advantage(self, data): ...",
        "compute_advantage: register an estimator with verl.trainer.ppo.core_algos.register_adv_est",
    ),
    "advantages of its own, put in from outside": (
        "import verl.trainer.ppo.ray_trainer as trainer\ntrainer.compute_advantage = lambda data, **_: data\n"
        "from verl.trainer.main_ppo import run_ppo\nrun_ppo({})",
        "set from outside, and nothing here calls it: verl.trainer.ppo.ray_trainer.compute_advantage: register an est",
    ),
    "a method put in from outside": (
        "from verl.trainer.ppo.ray_trainer import RayPPOTrainer\nRayPPOTrainer._validate = lambda self: {}\n"
        "from verl.trainer.main_ppo import run_ppo\nrun_ppo({})",
        "_validate: override validate(now)",
    ),
    "a task runner": (
        "from verl.trainer.main_ppo import TaskRunner\nclass Mine(TaskRunner): ...",
        "verl's TaskRunner is not in verl.trainer.main_ppo here: the driver is no Ray actor",
    ),
    "a task runner that is no subclass": (
        "from verl.trainer.main_ppo import run_ppo\nclass Mine:\n    def run(self, config): ...\n"
        "run_ppo({}, task_runner_class=Mine)",
        "run_ppo(task_runner_class=Mine): the driver is no Ray actor and builds the run itself",
    ),
    "a main of its own": (
        "from verl.trainer.ppo.ray_trainer import RayPPOTrainer\n"
        "RayPPOTrainer(config={}, tokenizer=None, role_worker_mapping={}, resource_pool_manager=None).fit()",
        "RayPPOTrainer(tokenizer, role_worker_mapping, resource_pool_manager): these are arguments of verl's",
    ),
    "roles mapped to workers": (
        "from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role",
        "verl's ResourcePoolManager is not in verl.trainer.ppo.ray_trainer here: trainer.nnodes",
    ),
}


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    for name in ("compute_advantage", "_validate"):
        for place in (ray_trainer, ray_trainer.RayPPOTrainer):
            if name in vars(place):
                delattr(place, name)


@pytest.mark.parametrize("recipe", REFUSED)
def test_a_recipe_ends_with_one_line_that_names_what_to_write(recipe):
    source, told = REFUSED[recipe]
    with pytest.raises((ConfigError, ImportError)) as caught:
        exec(compile(source, f"{recipe}.py", "exec"), {"__name__": "recipe_of_someone"})
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert PATH in str(caught.value)


def test_what_is_put_in_from_outside_is_told_by_check_too():
    ray_trainer.compute_advantage = lambda data, **_: data
    with pytest.raises(ConfigError, match="set from outside"):
        check_ppo(None)


WORKING = """
import torch
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.reward_manager import register
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, register as register_loop

@register_adv_est("of_a_recipe")
def advantage(token_level_rewards, response_mask, index, config=None, **kwargs):
    scores = token_level_rewards.sum(-1, keepdim=True)
    return scores * response_mask, scores * response_mask

@register_policy_loss("of_a_recipe")
def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **kwargs):
    value = agg_loss(-advantages * log_prob, response_mask, loss_agg_mode)
    return value, {"actor/mine": value.detach().item()}

@register("of_a_recipe")
class Manager:
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", **kwargs):
        self.compute_score = compute_score

    def __call__(self, data, return_dict=False):
        return {"reward_tensor": torch.zeros_like(data.batch["responses"], dtype=torch.float32)}

@register_loop("of_a_recipe")
class Loop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs): ...

class Rows(RLHFDataset):
    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["mine"] = True
        return row
"""


def test_what_a_recipe_registers_is_what_the_configuration_takes(tmp_path, monkeypatch):
    (tmp_path / "a_recipe_of_someone.py").write_text(WORKING)
    monkeypatch.syspath_prepend(tmp_path)
    import a_recipe_of_someone as recipe

    assert core_algos.get_adv_estimator_fn("of_a_recipe") is recipe.advantage
    assert core_algos.get_policy_loss_fn("of_a_recipe") is recipe.loss
    assert get_reward_manager_cls("of_a_recipe") is recipe.Manager
    planned = check_ppo(
        _composed(
            "algorithm.adv_estimator=of_a_recipe",
            "actor_rollout_ref.actor.policy_loss.loss_mode=of_a_recipe",
            "actor_rollout_ref.model.external_lib=a_recipe_of_someone",
            "reward_model.reward_manager=of_a_recipe",
            "actor_rollout_ref.rollout.agent.default_agent_loop=of_a_recipe",
            "data.custom_cls.path=pkg://a_recipe_of_someone",
            "data.custom_cls.name=Rows",
        )
    )
    assert planned.problems == []
    del sys.modules["a_recipe_of_someone"]


def _composed(*overrides):
    """As `hydra.main` gives it to a recipe's main, and what `run_ppo` makes of it."""
    from verl.trainer.main_ppo import _typed

    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return _typed(compose("ppo_trainer", overrides=[*overrides]))


def test_what_a_recipes_hydra_has_composed_is_checked_as_a_command_line_is():
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        wrong = compose("ppo_trainer", overrides=["trainer.n_gpus_per_node=0", "+trainer.nnode=2"])
    with pytest.raises(ConfigError) as caught:
        run_ppo(wrong)
    assert "Did you mean 'trainer.nnodes'?" in str(caught.value)
    assert "trainer.n_gpus_per_node" in str(caught.value)
