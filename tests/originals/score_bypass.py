"""Losses of `bypass_mode`, and what they tell, by whichever verl is first on the path, from {batches, cases} as JSON.

Run as a file, with PyPI's verl or this project in front. A case is (batch, aggregation, options of the correction, and
of the actor), and old log-probs are the rollout engine's. Prints a JSON list of {loss, gradient, metrics}, or {error},
of each way to compute it.
"""

import importlib
import json
import sys
from dataclasses import replace
from importlib import util
from typing import Any

import torch

from verl.workers.config.actor import ActorConfig, PolicyLossConfig

Told = tuple[torch.Tensor, dict[str, Any]]
OF_VERL = util.find_spec("verl.trainer.ppo.rollout_corr_helper") is not None


def by_verl(batch: dict[str, torch.Tensor], mode: str, options: dict[str, Any], actor: dict[str, Any]) -> Told:
    """As its engines call it, which tell the tokens and sequences of the mini-batch."""
    correction = importlib.import_module("verl.trainer.config.algorithm").__dict__["RolloutCorrectionConfig"]
    chosen: Any = PolicyLossConfig(rollout_correction=correction(**{"rollout_is": None, **options}))
    needed: dict[str, Any] = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    config: Any = ActorConfig(**needed, **actor, policy_loss=chosen)
    mask = batch["response_mask"]
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=mask.sum(),
        global_batch_size=mask.any(-1).sum(),
        loss_scale_factor=config.loss_scale_factor,
    )
    losses = importlib.import_module("verl.trainer.ppo.core_algos").__dict__
    return losses["compute_policy_loss_bypass_mode"](**batch, loss_agg_mode=mode, config=config)


def by_us(batch: dict[str, torch.Tensor], mode: str, options: dict[str, Any], actor: dict[str, Any]) -> Told:
    from verl.protocol import DataProto
    from verl.workers.actor_loss import ActorLoss
    from verl.workers.config import RolloutCorrectionConfig
    from verl.workers.losses import LossTotals

    given = {name: batch[name] for name in ("advantages", "response_mask")} | {"old_log_probs": batch["old_log_prob"]}
    loss_fn = ActorLoss(ActorConfig(loss_agg_mode=mode, **actor), RolloutCorrectionConfig(**options))
    totals = LossTotals.of(batch["response_mask"])
    return loss_fn(batch["log_prob"], None, DataProto.from_dict(tensors=given), totals)


def by_name(batch: dict[str, torch.Tensor], mode: str, options: dict[str, Any], actor: dict[str, Any]) -> Told:
    """The function that scripts import."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_bypass_mode
    from verl.workers.config import RolloutCorrectionConfig
    from verl.workers.losses import LossTotals, within_mini_batch

    given: Any = {"config": ActorConfig(**actor), "correction": RolloutCorrectionConfig(**options)}
    totals = replace(LossTotals.of(batch["response_mask"]), loss_scale_factor=actor.get("loss_scale_factor"))
    with within_mini_batch(totals):
        return compute_policy_loss_bypass_mode(**batch, loss_agg_mode=mode, **given)


WAYS = (by_verl,) if OF_VERL else (by_us, by_name)


def computed(given: dict[str, list[list[float]]], way: Any, *case: Any) -> object:
    batch = {name: torch.tensor(rows) for name, rows in given.items()}
    log_prob = batch["log_prob"].requires_grad_()
    try:
        loss, metrics = way(batch, *case)
    except ZeroDivisionError:
        return {"error": "ZeroDivisionError"}
    (gradient,) = torch.autograd.grad(loss, log_prob, allow_unused=True, materialize_grads=True)
    numbers = {name: float(value) for name, value in metrics.items()}
    return {"loss": loss.item(), "gradient": gradient.flatten().tolist(), "metrics": numbers}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    found = [[computed(given["batches"][batch], way, *case) for way in WAYS] for batch, *case in given["cases"]]
    sys.stdout.write("\n" + json.dumps(found))
