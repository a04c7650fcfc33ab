"""Formulas beside policy losses by whichever verl is first on the path: {batches, cases} comes in as JSON.

Run as a file, with PyPI's verl or this project in front. A case is (kind, batch, arguments); prints a JSON list of
{name: numbers}, or {error: its type}.
"""

import importlib
import inspect
import json
import sys
from importlib import util
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from verl.trainer.ppo import core_algos
from verl.utils.torch_functional import masked_whiten
from verl.workers.config.actor import ActorConfig

Numbers = dict[str, list[float]]
Batch = dict[str, Any]

CORRECTION = "verl.trainer.ppo.rollout_corr_helper"
of_verl: Any = importlib.import_module(CORRECTION) if util.find_spec(CORRECTION) else None
"""The place of verl's rollout correction; ours has no such module."""


def estimated(batch: Batch, name: str, options: dict[str, Any], weigh: bool = False) -> Numbers:
    """Advantages and returns on the tokens of the policy; elsewhere they are used by nobody."""
    place = ("verl.trainer.config.algorithm", "AlgoConfig") if of_verl else ("verl.workers.config", "AlgorithmConfig")
    config = getattr(importlib.import_module(place[0]), place[1])(**options)
    function = core_algos.get_adv_estimator_fn(name)
    mask = batch["response_mask"]
    given = {
        "token_level_rewards": batch["rewards"],
        "response_mask": mask,
        "index": np.array(batch["index"], dtype=object),
        "config": config,
        "values": batch["values"],
        "reward_baselines": batch["baselines"],
        "old_log_probs": batch["old_log_prob"],
        "sum_pi_squared": batch["sum_pi_squared"],
        "rollout_is_weights": batch["weights"] if weigh else None,
        "gamma": config.gamma,
        "lam": config.lam,
        "norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo,
    }
    taken = inspect.signature(function).parameters
    advantages, returns = function(**{key: value for key, value in given.items() if key in taken})
    return {"advantages": advantages[mask.bool()].tolist(), "returns": returns[mask.bool()].tolist()}


def by_component(batch: Batch, options: dict[str, Any]) -> Numbers:
    """Advantages of gdpo: verl finds the components beside the tensors, ours are a tensor."""
    mask, components = batch["response_mask"], batch["components"]
    keys = [f"component {column}" for column in range(components.shape[1])]
    index, options = np.array(batch["index"], dtype=object), {"gdpo_reward_keys": keys, **options}
    function: Any = core_algos.get_adv_estimator_fn("gdpo")
    if of_verl:
        from verl.trainer.config.algorithm import AlgoConfig

        prompts = torch.ones(len(mask), 3, dtype=torch.long)
        given = {
            "norm_adv_by_std_in_grpo": options.get("norm_adv_by_std_in_grpo", True),
            "config": AlgoConfig(**options),
            "non_tensor_batch": dict(zip(keys, components.T.numpy(), strict=True)),
            "batch": {"prompts": prompts, "attention_mask": torch.cat([prompts, mask.long()], dim=1)},
        }
    else:
        from verl.workers.config import AlgorithmConfig

        given = {"config": AlgorithmConfig(**options), "reward_components": components}
    advantages, returns = function(batch["rewards"], mask, index, **given)
    return {"advantages": advantages[mask.bool()].tolist(), "returns": returns[mask.bool()].tolist()}


def divergence(batch: Batch, name: str) -> Numbers:
    log_prob = batch["log_prob"].clone().requires_grad_()
    found = core_algos.kl_penalty(log_prob, batch["old_log_prob"], name)
    (gradient,) = torch.autograd.grad(found.sum(), log_prob)
    return {"value": found.flatten().tolist(), "gradient": gradient.flatten().tolist()}


def aggregated(batch: Batch, mode: str, options: dict[str, Any], weigh: bool = False) -> Numbers:
    losses = batch["log_prob"].clone().requires_grad_()
    found = core_algos.agg_loss(losses, weighed(batch) if weigh else batch["response_mask"], mode, **options)
    (gradient,) = torch.autograd.grad(found, losses)
    return {"value": [found.item()], "gradient": gradient.flatten().tolist()}


def value_loss(batch: Batch, mode: str, clip: float = 0.5) -> Numbers:
    predicted = batch["predicted"].clone().requires_grad_()
    found = core_algos.compute_value_loss(
        predicted, batch["returns"], batch["values"], batch["response_mask"], clip, loss_agg_mode=mode
    )
    loss, clipped = found[0], found[1]["critic/vf_clipfrac"] if isinstance(found[1], dict) else found[1].item()
    (gradient,) = torch.autograd.grad(loss, predicted)
    return {"value": [loss.item()], "gradient": gradient.flatten().tolist(), "clipped": [clipped]}


def weighed(batch: Batch) -> torch.Tensor:
    """A mask of other numbers than zeros and ones."""
    return batch["response_mask"] * batch["weights"]


def whitened(batch: Batch, shift: bool, weigh: bool = False) -> Numbers:
    mask = weighed(batch) if weigh else batch["response_mask"]
    found = masked_whiten(batch["returns"], mask, shift_mean=shift)
    return {"value": found[mask.bool()].tolist(), "beside": found[~mask.bool()].tolist()}


def penalised(batch: Batch, kind: str, name: str, options: dict[str, Any] | None = None, times: int = 1) -> Numbers:
    """The last of as many batches: the coefficient moves from each to the next."""
    mask, given = batch["response_mask"], {"old_log_probs": batch["log_prob"], "ref_log_prob": batch["old_log_prob"]}
    control: Any
    if kind == "adaptive":
        settings = {"init_kl_coef": 0.2, "target_kl": 0.1, "horizon": 50, **(options or {})}
        control = core_algos.AdaptiveKLController(**settings)
    else:
        control = core_algos.FixedKLController(0.2)
    for _ in range(times):
        if of_verl:
            from verl import DataProto

            apply = importlib.import_module("verl.trainer.ppo.ray_trainer").__dict__["apply_kl_penalty"]
            data = DataProto.from_dict({**given, "token_level_scores": batch["rewards"], "response_mask": mask})
            data, metrics = apply(data, control, name)
            rewards = data.batch["token_level_rewards"]
        else:
            rewards, metrics = core_algos.apply_kl_penalty(
                batch["rewards"], **given, response_mask=mask, kl_ctrl=control, kl_penalty=name
            )
    named = {key: [float(value)] for key, value in metrics.items()}
    return {"rewards": rewards.flatten().tolist(), "coefficient": [control.value], **named}


def corrected(batch: Batch, options: dict[str, Any]) -> Numbers:
    log_probs, mask = (batch["log_prob"], batch["old_log_prob"]), batch["response_mask"]
    if of_verl:
        proto, kept, metrics = of_verl.compute_rollout_correction_and_rejection_mask(*log_probs, mask, **options)
        weights = None if proto is None else proto.batch["rollout_is_weights"]
    else:
        from verl.trainer.ppo.rollout_correction import compute_rollout_importance_weights, rejected
        from verl.workers.config import RolloutCorrectionConfig

        config = RolloutCorrectionConfig(**options)
        weights, metrics = compute_rollout_importance_weights(*log_probs, mask, config)
        kept, more = rejected(*log_probs, mask, config)
        metrics |= more
    numbers = {key: [float(value)] for key, value in metrics.items()}
    return {
        "kept": kept.flatten().tolist(),
        "weights": [] if weights is None else weights.flatten().tolist(),
        **numbers,
    }


def scheduled(_: Batch, warmup: int, total: int | None, options: dict[str, Any], steps: int = 10) -> Numbers:
    """Rates of as many steps: constant after the warm-up without `total`, else a cosine that ends there."""
    if of_verl:
        places = importlib.import_module("verl.utils.torch_functional").__dict__
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        if total is None:
            schedule = places["get_constant_schedule_with_warmup"](optimizer, warmup)
        else:
            schedule = places["get_cosine_schedule_with_warmup"](optimizer, warmup, total, **options)
        rates = []
        for _step in range(steps):
            rates += schedule.get_last_lr()
            optimizer.step()
            schedule.step()
        return {"rates": rates}
    from verl.workers.config import OptimizerConfig
    from verl.workers.engine.schedule import learning_rate

    config = OptimizerConfig(
        lr=1.0,
        lr_warmup_steps=warmup,
        lr_scheduler_type="constant" if total is None else "cosine",
        total_training_steps=total or -1,
        **options,
    )
    return {"rates": [learning_rate(step, config) for step in range(steps)]}


def named(_: Batch) -> Numbers:
    """The public functions and classes of `core_algos`; of verl's those that it has made itself."""
    return {
        name: []
        for name, found in vars(core_algos).items()
        if not name.startswith("_") and callable(found)
        if not of_verl or found.__module__ == core_algos.__name__
    }


def entropy_loss(batch: Batch, mode: str) -> Numbers:
    logits = torch.stack([batch["log_prob"], batch["returns"], batch["values"]], dim=-1).requires_grad_()
    found = core_algos.compute_entropy_loss(logits, batch["response_mask"], mode)
    (gradient,) = torch.autograd.grad(found, logits)
    return {"value": [found.item()], "gradient": gradient.flatten().tolist()}


def reinforced(batch: Batch, mode: str, weigh: bool) -> Numbers:
    log_prob = batch["log_prob"].clone().requires_grad_()
    weights = batch["weights"] if weigh else None
    needed: Any = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1} if of_verl else {}
    given = (batch["old_log_prob"], log_prob, batch["values"], batch["response_mask"], mode, ActorConfig(**needed))
    found, metrics = core_algos.compute_policy_loss_reinforce(*given, rollout_is_weights=weights)
    (gradient,) = torch.autograd.grad(found, log_prob)
    told = {name: [float(value)] for name, value in metrics.items()}
    return {"value": [found.item()], "gradient": gradient.flatten().tolist(), **told}


def redrawn(batch: Batch, method: str, power: float) -> Numbers:
    """Which samples are drawn, in order, from torch's generator at one seed."""
    from verl import DataProto

    rows = torch.arange(len(batch["rewards"]))
    data = DataProto.from_dict({"token_level_scores": batch["rewards"], "row": rows})
    torch.manual_seed(0)
    drawn: Any = core_algos.compute_pf_ppo_reweight_data(data, method, power)
    return {"rows": drawn.batch["row"].tolist()}


def filtered(_: Batch, metric: str, groups: list[list[float]]) -> Numbers:
    """Numbers of the groups that dynamic sampling keeps: a group is what each of its responses earned."""
    earned = {f"{group}_{member}_0": value for group, of in enumerate(groups) for member, value in enumerate(of)}
    if of_verl:
        place = importlib.import_module("verl.trainer.ppo.v1.replay_buffer")

        def stored(*, keys: list[str], **_: Any) -> dict[str, Any]:
            scores = torch.tensor([[0.0, earned[key], 0.0] for key in keys])
            return {"rm_scores": scores, "extra_fields": [{"reward_extra_info": {metric: earned[key]}} for key in keys]}

        buffer = object.__new__(place.ReplayBuffer)
        finished = {str(group) for group in range(len(groups))}
        found: dict[str, Any] = {"finished_keys": finished, "_dapo_classification_cache": {}}
        found["partitions"] = dict.fromkeys(earned, {"status": "finished"})
        buffer.__dict__.update({name: {"train": value} for name, value in found.items()})
        buffer.filter_groups_metric = metric
        vars(place)["tq"] = SimpleNamespace(kv_batch_get=stored)  # its store, which is a server
        dropped, _counts = buffer._dapo_filtered_keys("train")
        return {"kept": sorted(map(int, finished - dropped))}
    from verl import DataProto
    from verl.trainer.ppo.dynamic_sampling import DynamicBatch
    from verl.workers.reward_manager import RewardOutput

    batch = DataProto.from_dict(
        {"responses": torch.zeros(len(earned), 1)},
        {"uid": np.array([key.split("_")[0] for key in earned], dtype=object)},
    )
    info: dict[str, Any] = {metric: [0.0] * len(earned) if metric == "reward" else list(earned.values())}
    scores = torch.tensor(list(earned.values())).unsqueeze(-1)
    filling: Any = DynamicBatch(metric=metric, wanted=0, max_batches=1)
    kept = filling.add(batch, RewardOutput(reward_tensor=scores, responses=[""] * len(earned), extra_info=info))
    return {"kept": sorted(map(int, kept))}


KINDS: dict[str, Any] = {
    "names": named,
    "entropy loss": entropy_loss,
    "reinforce": reinforced,
    "redrawn": redrawn,
    "estimator": estimated,
    "components": by_component,
    "divergence": divergence,
    "aggregation": aggregated,
    "value loss": value_loss,
    "whitening": whitened,
    "kl in reward": penalised,
    "correction": corrected,
    "schedule": scheduled,
    "filter": filtered,
}


def tensors(batch: dict[str, Any]) -> Batch:
    return {key: value if key == "index" else torch.tensor(value) for key, value in batch.items()}


def computed(kind: str, batch: Batch, arguments: list[Any]) -> Any:
    try:
        return KINDS[kind](batch, *arguments)
    except Exception as exc:  # noqa: BLE001 - that the one refuses is a result
        return {"error": f"{type(exc).__name__}: {exc}"[:300]}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    batches = {name: tensors(batch) for name, batch in given["batches"].items()}
    found = [computed(kind, batches[batch], arguments) for kind, batch, *arguments in given["cases"]]
    sys.stdout.write("\n" + json.dumps(found))
