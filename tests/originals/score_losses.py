"""Policy losses by whichever verl is first on the path: {configs, batches, totals, cases} comes in as JSON.

`totals` has, by the name of a configuration, what the mini-batch is divided by, where that is not the batch itself.
Run as a file, with PyPI's verl or this project in front. Prints a JSON list: {loss, gradient, metrics}.
"""

import json
import sys
from contextlib import nullcontext
from importlib import util
from typing import Any

import torch

from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config.actor import ActorConfig, PolicyLossConfig

OF_VERL = util.find_spec("verl.trainer.ppo.rollout_corr_helper") is not None


def within(totals: dict[str, Any], config: Any, mask: torch.Tensor) -> Any:
    """A block in which losses are divided by `totals`; verl's find them in their configuration, from here on."""
    if OF_VERL:
        names = {"num_tokens": "batch_num_tokens", "num_sequences": "global_batch_size"}
        config.global_batch_info.update({names.get(name, name): value for name, value in totals.items()})
        return nullcontext()
    from verl.workers.losses.aggregation import LossTotals, within_mini_batch

    of_batch = LossTotals.of(mask)
    counted = {"num_tokens": of_batch.num_tokens, "num_sequences": of_batch.num_sequences}
    return within_mini_batch(LossTotals(**counted | totals))


def computed(
    config: ActorConfig, totals: dict[str, Any], batch: dict[str, Any], name: str, mode: str, weigh: bool
) -> object:
    tensors = {key: torch.tensor(rows) for key, rows in batch.items()}
    mask = tensors["response_mask"]
    log_prob = tensors["log_prob"].requires_grad_()
    torch.manual_seed(0)
    with within(totals, config, mask):
        loss, metrics = get_policy_loss_fn(name)(
            old_log_prob=tensors["old_log_prob"],
            log_prob=log_prob,
            advantages=tensors["advantages"],
            response_mask=mask,
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=tensors["weights"] if weigh else None,
        )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    named = {key: float(value) for key, value in metrics.items()}
    return {"loss": loss.item(), "gradient": gradient.flatten().tolist(), "metrics": named}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    configs = {
        name: ActorConfig(**options, policy_loss=PolicyLossConfig(**of_loss))
        for name, (options, of_loss) in given["configs"].items()
    }
    totals, batches = given.get("totals", {}), given["batches"]
    found = [
        computed(configs[config], totals.get(config, {}), batches[batch], *case)
        for config, batch, *case in given["cases"]
    ]
    sys.stdout.write("\n" + json.dumps(found))
