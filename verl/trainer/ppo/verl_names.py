"""Names of verl's trainer that have no equal here, and what to write in their place.

Recipes import them, and subclass `RayPPOTrainer` by overriding methods that nothing here would call: both are told so,
where the script says it, instead of failing later or having no effect.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from verl.utils.config import ConfigError

PAGE = "docs/coming-from-verl.md"
RUN = "run a loop of your own with verl.trainer.main_ppo.run_ppo(config, trainer_class=...)"
DATASET = "data.custom_cls names a data set class of your own, and data.shuffle and data.seed decide the order"
THROUGHPUT = "it is verl.trainer.ppo.metric_utils.compute_throughput_metrics(batch, timings, num_ranks)"
VARIANCE = "the variance of gradients is not among the metrics"
REWARD = "it is verl.trainer.ppo.reward.compute_reward(data, manager): rewards, and what else was said"
OF_EXPERTS = (
    *("RolloutMoELoadBalanceMetricsAccumulator", "compute_moe_lb_metrics", "compute_rollout_moe_load_balance_metrics"),
    *("get_hf_config_override_kwargs", "get_metric_data_with_optional_routed_experts", "infer_moe_num_experts"),
    "infer_rollout_moe_num_experts",
)
SCORES = "process_validation_metrics(...) has best, worst and majority of n"
NAMES: dict[str, dict[str, str]] = {
    "verl.trainer.main_ppo": {
        "TaskRunner": f"the driver is no Ray actor and builds the run itself: {RUN}",
        "TaskRunnerV1": f"the driver is no Ray actor and builds the run itself: {RUN}",
        "create_rl_dataset": DATASET,
        "create_rl_sampler": DATASET,
    },
    "verl.trainer.ppo.ray_trainer": {
        "Role": "there are no roles to map to workers: the configuration says what trains, generates and scores",
        "ResourcePoolManager": "trainer.nnodes, trainer.n_gpus_per_node and trainer.placement say who is where",
        "compute_advantage": "register an estimator with verl.trainer.ppo.core_algos.register_adv_est and set "
        "algorithm.adv_estimator to its name",
        "apply_kl_penalty": "set algorithm.use_kl_in_reward, algorithm.kl_penalty and algorithm.kl_ctrl",
        "compute_response_mask": "batches have it as response_mask, 0 on what tools wrote",
        "compute_throughout_metrics": THROUGHPUT,
        "compute_variance_proxy_metrics": VARIANCE,
        "compute_spec_decode_metrics": "drafts of speculative decoding are not among the metrics",
        "create_rl_dataset": DATASET,
        "create_rl_sampler": DATASET,
        "extract_reward": REWARD,
        "need_reward_model": "it is reward_model.enable",
        "need_teacher_policy": "it is distillation.enabled",
    },
    "verl.trainer.ppo.metric_utils": {
        "compute_throughout_metrics": THROUGHPUT,
        "compute_variance_proxy_metrics": VARIANCE,
        **dict.fromkeys(OF_EXPERTS, "the load of experts is not among the metrics"),
        "reduce_metrics": "workers' metrics are means over ranks already",
        "bootstrap_metric": SCORES,
        "calc_maj_val": SCORES,
    },
    "verl.trainer.ppo.reward": {
        "compute_reward_async": "rewards are scored by reward_model.num_workers processes while others are generated",
        "extract_reward": REWARD,
        "resolve_reward_manager_cls": "it is verl.workers.reward_manager.get_reward_manager_cls(name)",
    },
    "verl.trainer.ppo.core_algos": {
        "compute_policy_loss": "it is compute_policy_loss_vanilla, which returns (loss, metrics)",
        "compute_rewards": "it is apply_kl_penalty, with a controller of the coefficient and any kl_penalty",
        "kl_penalty_forward": "it is kl_penalty, which has verl's gradients as well",
    },
    "verl.trainer.ppo.utils": {
        "Role": "there are no roles to map to workers: the configuration says what trains, generates and scores",
        "need_reward_model": "it is reward_model.enable",
        "need_teacher_policy": "it is distillation.enabled",
        "create_rl_dataset": DATASET,
        "create_rl_sampler": DATASET,
    },
}
ELSEWHERE: dict[str, dict[str, str]] = {
    "verl.trainer.ppo.ray_trainer": {
        **dict.fromkeys(("AdvantageEstimator", "agg_loss"), "verl.trainer.ppo.core_algos"),
        **dict.fromkeys(("need_critic", "need_reference_policy"), "verl.trainer.ppo.utils"),
        **dict.fromkeys(
            ("compute_data_metrics", "compute_timing_metrics", "process_validation_metrics"),
            "verl.trainer.ppo.metric_utils",
        ),
    },
    "verl.trainer.ppo.utils": {"AdvantageEstimator": "verl.trainer.ppo.core_algos"},
}
"""Names that verl's module has imported, and where they are."""
ARGUMENTS = ("tokenizer", "role_worker_mapping", "resource_pool_manager", "ray_worker_group_cls")
"""Of verl's constructor alone."""
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


def refused(module: str) -> Callable[[str], Any]:
    """`__getattr__` of `module`: what is elsewhere, and ImportError, which `from module import name` passes on, for the
    other names of verl's there."""

    def get(name: str) -> Any:
        if (place := ELSEWHERE.get(module, {}).get(name)) is not None:
            return getattr(importlib.import_module(place), name)
        if name in NAMES[module]:
            raise ImportError(f"verl's {name} is not in {module} here: {NAMES[module][name]} ({PAGE})")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


def refuse_overrides(cls: type[Any]) -> None:
    """Raises ConfigError for a subclass of `RayPPOTrainer` with methods that verl's trainer calls and this one not."""
    found = [f"{name}: {METHODS[name]}" for name in vars(cls) if name in METHODS]
    fit = vars(cls).get("fit")
    if inspect.isfunction(fit) and not _takes_one_more(fit):
        found.append("fit(self): it is fit(self, resume_from) here; the loop is train_after(start), a step learn")
    if found:
        told = "; ".join(found)
        raise ConfigError(f"{cls.__name__} is written for verl's RayPPOTrainer. {told}. {RUN} ({PAGE})")


def refuse_replaced() -> None:
    """Raises ConfigError for functions and methods of verl's that a script has put into these modules or this trainer
    from outside: nothing here would call them."""
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
