"""Refuses what recipes do to verl's trainer without effect here; the error says what to write instead.

Recipes override methods of `RayPPOTrainer` that nothing here calls, and replace functions in modules.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from verl.instead import PAGE
from verl.instead.names import DATASET, NAMES, RUN
from verl.utils.config import ConfigError

ARGUMENTS = ("tokenizer", "role_worker_mapping", "resource_pool_manager", "ray_worker_group_cls")
"""Arguments that only verl's constructor has."""
ESTIMATOR = NAMES["verl.trainer.ppo.ray_trainer"]["compute_advantage"]
METHODS = {
    "_validate": "override validate(now), or verl.trainer.ppo.validation.Validator",
    "compute_advantage": ESTIMATOR,
    "_compute_advantage": ESTIMATOR,
    "_save_checkpoint": "override save_checkpoint(step, prompts_state)",
    "_load_checkpoint": "override load_checkpoint(path)",
    "init_workers": "workers are started before the trainer is made, and are in self.cluster",
    "_create_dataloader": DATASET,
    "_get_gen_batch": "prompts are drawn by verl.trainer.ppo.sampling.Sampling.draw",
    "_compute_reward_colocate": "register a reward manager, or set custom_reward_function.path",
    "_compute_values": "override learn(batch, now)",
    "_compute_ref_log_prob": "override learn(batch, now)",
    "_compute_old_log_prob": "override learn(batch, now)",
    "_update_actor": "override learn(batch, now)",
    "_update_critic": "override learn(batch, now)",
    "_balance_batch": "trainer.balance_batch says whether ranks get as many tokens each",
    "_dump_generations": "trainer.rollout_data_dir and trainer.validation_data_dir take all samples",
    "_log_rollout_data": "trainer.rollout_data_dir takes all samples",
    "_maybe_log_val_generations": "trainer.log_val_generations shows some",
    "_val_metrics_update": "override verl.trainer.ppo.validation.Validator.validate",
}


def refuse_overrides(cls: type[Any]) -> None:
    """Raises ConfigError for a subclass of `RayPPOTrainer` with methods that only verl's trainer calls."""
    found = [f"{name}: {METHODS[name]}" for name in vars(cls) if name in METHODS]
    fit = vars(cls).get("fit")
    if inspect.isfunction(fit) and not _takes_one_more(fit):
        found.append("fit(self): it is fit(self, resume_from) here; the loop is train_after(start), a step learn")
    if found:
        told = "; ".join(found)
        raise ConfigError(f"{cls.__name__} is written for verl's RayPPOTrainer. {told}. {RUN} ({PAGE})")


def refuse_replaced() -> None:
    """Raises ConfigError for verl's functions that a script has put into these modules or this trainer: nothing here
    calls them."""
    found = [
        f"{module}.{name}: {why}"
        for module, names in NAMES.items()
        for name, why in names.items()
        if name in vars(sys.modules.get(module, object))
    ]
    trainer = vars(sys.modules.get("verl.trainer.ppo.ray_trainer", object)).get("RayPPOTrainer")
    if trainer is not None:
        refuse_overrides(trainer)
    if found:
        raise ConfigError(f"set from outside, and nothing here calls it: {'; '.join(found)} ({PAGE})")


def refuse_runner(task_runner_class: Any) -> None:
    """Raises ConfigError for verl's argument of `run_ppo`."""
    if task_runner_class is not None:
        why = NAMES["verl.trainer.main_ppo"]["TaskRunner"]
        raise ConfigError(f"run_ppo(task_runner_class={getattr(task_runner_class, '__name__', 'X')}): {why} ({PAGE})")


def refuse_arguments(cls: type[Any], given: Any) -> None:
    """Raises ConfigError for arguments of verl's constructor."""
    if verls := [name for name in ARGUMENTS if name in given]:
        raise ConfigError(
            f"{cls.__name__}({', '.join(verls)}): these are arguments of verl's constructor. Trainers here get "
            f"parts that already run: {RUN} ({PAGE})"
        )


def _takes_one_more(function: Callable[..., Any]) -> bool:
    """Than `self`."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    return True
