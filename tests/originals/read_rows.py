"""The items of PyPI's verl's data set: {cases, cuts} comes in as JSON, a case is {tokenizer, file, config,
max_samples}, a cut (side, length, limit).

A case gives the list of its items, {raw_prompt, index, prompt_ids, tools_kwargs, ...}, or {error}; a cut the ids that
are left. Run as a file with PyPI's verl in front.
"""

import json
import sys
from typing import Any

import datasets
import torch
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.torch_functional import postprocess_data

NAMES = ("raw_prompt", "index", "tools_kwargs", "interaction_kwargs", "data_source", "reward_model", "ability")


def items(case: dict[str, Any], tokenizer: Any) -> list[dict[str, Any]] | dict[str, Any]:
    config = OmegaConf.create(case["config"])
    try:
        dataset = RLHFDataset(case["file"], tokenizer, config, max_samples=case["max_samples"])
        read = [dataset[row] for row in range(len(dataset))]
    except Exception as exc:  # noqa: BLE001 - that it raises is a result, too
        return {"error": f"{type(exc).__name__}: {exc}"[:300]}
    found = []
    options = case["config"].get("apply_chat_template_kwargs", {})
    for item in read:
        ids = tokenizer.apply_chat_template(
            item["raw_prompt"], add_generation_prompt=True, return_dict=False, **options
        )
        found.append({**{name: item[name] for name in NAMES if name in item}, "prompt_ids": ids})
    return found


def cut(case: tuple[str, int, int]) -> list[int]:
    """Padded on the left by 0."""
    side, length, limit = case
    ids = torch.arange(1, length + 1).unsqueeze(0)
    options = {"max_length": limit, "pad_token_id": 0, "left_pad": True, "truncation": side}
    return postprocess_data(ids, torch.ones_like(ids), **options)[0][0].tolist()


if __name__ == "__main__":
    given = json.load(sys.stdin)
    datasets.disable_progress_bars()
    tokenizers = {path: AutoTokenizer.from_pretrained(path) for path in {case["tokenizer"] for case in given["cases"]}}
    read = [items(case, tokenizers[case["tokenizer"]]) for case in given["cases"]]
    found = {"items": read, "cuts": [*map(cut, given["cuts"])]}
    sys.stdout.write("\n" + json.dumps(found))
