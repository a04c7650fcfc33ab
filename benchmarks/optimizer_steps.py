"""What a real optimizer makes of a model's weights, step after step, in bfloat16: for benchmarks of deltas."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from benchmarks.random_model import make_random_model
from benchmarks.synthetic_model import RankRows
from verl.checkpoint_engine.plan.types import TensorSpec

WARM_UP = 5
"""Steps before the first version: Adam's moments are those of a run then, not of its first step."""
TOKENS = 4096
BATCH = (4, 48)


def record_versions(directory: Path, *, size_mib: float, learning_rate: float, versions: int) -> None:
    """Train a Qwen2 of `size_mib` in float32 with AdamW, and write its weights as they are after each step.

    `version-<i>.bin` has the tensors of `specs.json` back to back. The values are random, the data is a fixed random
    text; what is real is how the updates compare with the weights.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_random_model(directory / "model", size_mib), dtype=torch.float32)
    parameters = dict(model.named_parameters())
    specs = [[name, list(parameter.shape)] for name, parameter in parameters.items()]
    (directory / "specs.json").write_text(json.dumps(specs))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, model.config.vocab_size, (TOKENS,), generator=generator)
    rows, length = BATCH
    for step in range(WARM_UP + versions):
        starts = torch.randint(0, TOKENS - length, (rows,), generator=generator).tolist()
        tokens = torch.stack([text[start : start + length] for start in starts])
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= WARM_UP:
            with (directory / f"version-{step - WARM_UP}.bin").open("wb") as file:
                for parameter in parameters.values():
                    file.write(parameter.detach().to(torch.bfloat16).view(torch.int16).numpy().tobytes())


class RecordedRank(RankRows):
    """Rows of recorded versions."""

    def __init__(self, directory: Path, rank: int, world_size: int) -> None:
        specs = [
            TensorSpec(name=name, shape=tuple(shape), dtype="bfloat16")
            for name, shape in json.loads((directory / "specs.json").read_text())
        ]
        super().__init__(specs, rank, world_size, "bfloat16")
        self._directory, self._version = directory, 0
        self._versions = len(list(directory.glob("version-*.bin")))
        self._load()

    def step(self) -> None:
        """Take over the next version; after the last one the one before it, and so on: it is as far away."""
        self._version += 1
        self._load()

    def _load(self) -> None:
        turn = self._version % (2 * self._versions - 2)
        number = min(turn, 2 * self._versions - 2 - turn)
        whole = np.memmap(self._directory / f"version-{number}.bin", np.int16, "r")
        start = 0
        for spec in self._specs:
            numel = spec.nbytes // 2
            if rows := self._boxes.get(spec.name):
                row = numel // spec.shape[0]
                part = whole[start + rows.start[0] * row : start + rows.stop[0] * row]
                self._rows[spec.name].view(torch.int16).reshape(-1).numpy()[:] = part
            start += numel
