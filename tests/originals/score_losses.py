"""Policy losses by whichever verl is first on the path: {configs, batches, cases} comes in as JSON.

Run as a file, with PyPI's verl or this project in front. Prints a JSON list: {loss, gradient, metrics}.
"""

import json
import sys

import torch

from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config.actor import ActorConfig, PolicyLossConfig


def computed(config: ActorConfig, batch: dict[str, list[list[float]]], name: str, mode: str, weigh: bool) -> object:
    tensors = {key: torch.tensor(rows) for key, rows in batch.items()}
    log_prob = tensors["log_prob"].requires_grad_()
    torch.manual_seed(0)
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob=tensors["old_log_prob"],
        log_prob=log_prob,
        advantages=tensors["advantages"],
        response_mask=tensors["response_mask"],
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
    found = [computed(configs[config], given["batches"][batch], *case) for config, batch, *case in given["cases"]]
    sys.stdout.write("\n" + json.dumps(found))
