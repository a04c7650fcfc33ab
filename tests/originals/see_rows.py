"""How PyPI's verl reads rows with pictures: a list of files comes in as JSON, one row each.

Each gives the messages of its item, whose pictures are the SHA-256 of their bytes, or {error}. Run as a file with
PyPI's verl in front. Its processor is only asked whether it is there.
"""

import hashlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import datasets
from omegaconf import OmegaConf

from verl.utils.dataset.rl_dataset import RLHFDataset


def written(part: dict[str, Any]) -> Any:
    if part["type"] != "image":
        return part
    return {"type": "image", "image": hashlib.sha256(part["bytes"]).hexdigest()}


def messages(file: str) -> Any:
    config = OmegaConf.create(
        {"prompt_key": "prompt", "image_key": "images", "max_prompt_length": 999, "filter_overlong_prompts": False}
    )
    seeing = SimpleNamespace(image_processor=SimpleNamespace(patch_size=14))
    try:
        found = RLHFDataset(file, SimpleNamespace(), config, processor=seeing)[0]["raw_prompt"]
    except Exception as exc:  # noqa: BLE001 - that it raises is a result, too
        return {"error": f"{type(exc).__name__}: {exc}"[:300]}
    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": [written(part) for part in message["content"]]}
        for message in found
    ]


if __name__ == "__main__":
    datasets.disable_progress_bars()
    found = [messages(file) for file in json.load(sys.stdin)]
    sys.stdout.write("\n" + json.dumps(found))
