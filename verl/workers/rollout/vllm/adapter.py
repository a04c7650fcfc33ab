"""Write adapters as files in peft's format, from which vLLM loads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from verl.workers.config import HFModelConfig

if TYPE_CHECKING:
    import torch

ADAPTER_NAME, ADAPTER_ID = "policy", 1
"""An engine has one adapter; a new version takes its place."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM 0.32 reserves memory."""
LARGEST_RANK = RANKS[-1]


def engine_rank(lora_rank: int) -> int:
    """The smallest rank for which vLLM reserves memory that has room for `lora_rank`, at most `LARGEST_RANK`."""
    return next(rank for rank in RANKS if rank >= lora_rank)


@contextmanager
def adapter_files(directory: Path, tensors: Mapping[str, torch.Tensor], model: HFModelConfig) -> Iterator[Path]:
    """Write `tensors`, under peft's names, to the existing `directory`; they are removed when the block ends.

    `model`: the configuration of the adapters. Called by the server, on the host of its engine's workers.
    """
    from safetensors.torch import save_file

    layers = [name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors]
    config = {
        "peft_type": "LORA",
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "target_modules": sorted(set(layers)),
    }
    files = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    try:
        save_file(dict(tensors), files[0])
        files[1].write_text(json.dumps(config), "utf-8")
        yield directory
    finally:
        for file in files:
            file.unlink(missing_ok=True)
