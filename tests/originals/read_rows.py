"""The items of PyPI's verl's data set: {tokenizer, cases} comes in as JSON, a case is {file, config, max_samples}.

Each gives the list of its items, {raw_prompt, index, prompt_ids, tools_kwargs, ...}, or {error}. Run as a file with
PyPI's verl in front.
"""

import json
import sys
from typing import Any

import datasets
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from verl.utils.dataset.rl_dataset import RLHFDataset

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


if __name__ == "__main__":
    given = json.load(sys.stdin)
    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(given["tokenizer"])
    sys.stdout.write("\n" + json.dumps([items(case, tokenizer) for case in given["cases"]]))
