"""Metrics of steps, partitions of lengths, and rewards of batches by PyPI's verl, from a dict of their lists.

A step is {tensors, turns, timings, critic}, a partition {lengths, parts, equal_size}, a reward {tokenizer, texts,
scores, buffer}, an unbalance [lengths, parts], what is divided into micro-batches {lengths, budget}. Run as a file with
PyPI's verl in front. Prints a dict of five lists.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transformers import AutoTokenizer
from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

import verl
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance, rearrange_micro_batches

DEFAULTS = Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"


def described(step: dict[str, Any]) -> dict[str, float]:
    tensors = {name: torch.tensor(rows) for name, rows in step["tensors"].items()}
    batch = DataProto.from_dict(tensors, {"__num_turns__": np.array(step["turns"], dtype=np.int32)})
    batch.meta_info["global_token_num"] = tensors["attention_mask"].sum(-1).tolist()
    found = {
        **compute_data_metrics(batch, use_critic=step["critic"]),
        **compute_timing_metrics(batch, step["timings"]),
        **compute_throughout_metrics(batch, step["timings"], n_gpus=2),
    }
    return {name: float(value) for name, value in found.items()}


def parts(given: dict[str, Any]) -> Any:
    try:
        return get_seqlen_balanced_partitions(given["lengths"], given["parts"], given["equal_size"])
    except Exception as exc:  # noqa: BLE001 - that it raises is a result, too
        return {"error": type(exc).__name__}


def micro_batches(given: dict[str, Any]) -> list[list[int]]:
    """Indices of each, as `use_dynamic_bsz` divides them."""
    lengths = torch.tensor(given["lengths"])
    mask = (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).long()
    rows = TensorDict({"attention_mask": mask, "input_ids": mask}, batch_size=len(lengths))
    return rearrange_micro_batches(rows, given["budget"])[1]


async def rewarded(given: dict[str, Any], number: int) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(given["tokenizer"])
    token_ids = tokenizer.encode(given["texts"][number])
    width = given["width"]
    padding = width - len(token_ids)
    config = OmegaConf.load(DEFAULTS)
    config.reward.reward_kwargs = {"overlong_buffer_cfg": given["buffer"], "max_resp_len": width}
    data = DataProto.from_dict(
        {
            "prompts": torch.tensor([[1]]),
            "responses": torch.tensor([[*token_ids, *[tokenizer.pad_token_id] * padding]]),
            "attention_mask": torch.tensor([[1, *[1] * len(token_ids), *[0] * padding]]),
        },
        {
            "data_source": np.array(["s"], dtype=object),
            "reward_model": np.array([{"ground_truth": "7"}], dtype=object),
            "extra_info": np.array([{"index": 0}], dtype=object),
        },
    )

    def compute_score(**arguments: Any) -> Any:
        seen.append(arguments["solution_str"])
        return given["scores"][number]

    seen: list[str] = []
    manager = DAPORewardManager if given["buffer"]["enable"] else NaiveRewardManager
    found = await manager(config, tokenizer, compute_score).run_single(data)
    extra = {
        name: float(value) if torch.is_tensor(value) else value for name, value in found["reward_extra_info"].items()
    }
    return {"score": float(found["reward_score"]), "extra": extra, "text": seen[0]}


async def main() -> dict[str, Any]:
    given = json.load(sys.stdin)
    return {
        "steps": [described(step) for step in given["steps"]],
        "partitions": [parts(each) for each in given["partitions"]],
        "micro-batches": [micro_batches(each) for each in given["micro-batches"]],
        "unbalances": [log_seqlen_unbalance(*each, "global_seqlen") for each in given["unbalances"]],
        "rewards": [
            [await rewarded(each, number) for number in range(len(each["texts"]))] for each in given["rewards"]
        ],
    }


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(asyncio.run(main())))
