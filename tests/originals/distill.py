"""Losses of on-policy distillation by PyPI's verl: a list of cases comes in as JSON.

Run as a file with PyPI's verl in front. A case has the options of both configurations and sequences, in which the
logits of every token are those of the next one. Prints a list of {loss, gradient, metrics}.
"""

import json
import sys
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.distillation.losses import distillation_ppo_loss

from verl.utils import tensordict_utils
from verl.workers.config import DistillationConfig, DistillationLossConfig, FSDPActorConfig

NEEDED = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}


def ragged(rows: list[Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def split(values: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values.reshape(-1), ends)


def found(case: dict[str, Any]) -> dict[str, Any]:
    sequences = [prompt + response for prompt, response in zip(case["prompts"], case["responses"], strict=True)]
    lengths = [*map(len, sequences)]
    actor = FSDPActorConfig(**NEEDED, **case["actor"])
    options = DistillationConfig(distillation_loss=DistillationLossConfig(**case["options"]))
    data = TensorDict(
        {
            "prompts": ragged(case["prompts"], torch.long),
            "responses": ragged(case["responses"], torch.long),
            "input_ids": ragged(sequences, torch.long),
            "response_mask": ragged(case["mask"], torch.long),
            "teacher_logprobs": ragged(case["teacher"]),
            "teacher_ids": ragged(case["candidates"], torch.long),
            "old_log_probs": ragged(case["old"]),
            "ref_log_prob": ragged(case["ref"]),
            "advantages": ragged(case["advantages"]),
        },
        batch_size=[len(sequences)],
    )
    totals = {"batch_num_tokens": sum(map(sum, case["mask"])), "global_batch_size": len(sequences), "dp_size": 1}
    tensordict_utils.assign_non_tensor(data, pad_mode="no_padding", max_response_len=case["width"], **totals)
    logits = torch.tensor(case["logits"], requires_grad=True)
    shares = logits.log_softmax(-1)
    said = {
        "log_probs": shares.gather(-1, torch.tensor(case["next"]).unsqueeze(-1)),
        "entropy": -(shares.exp() * shares).sum(-1),
    }
    if case["options"]["loss_mode"] == "forward_kl_topk":
        said |= distillation_ppo_loss(actor, options, None, data, None, logits.unsqueeze(0), "thd")
    said = {name: split(values, lengths) for name, values in said.items()}
    loss, metrics = distillation_ppo_loss(actor, options, said, data)
    loss.backward()
    numbers = {name: value.aggregate() if hasattr(value, "aggregate") else value for name, value in metrics.items()}
    return {
        "loss": loss.item(),
        "gradient": logits.grad.flatten().tolist() if logits.grad is not None else [0.0] * logits.numel(),
        "metrics": {name: float(value) for name, value in numbers.items()},
    }


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps([found(case) for case in json.load(sys.stdin)]))
