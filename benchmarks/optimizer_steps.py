"""What a real optimizer makes of a model's weights, step after step, in bfloat16: for benchmarks of deltas."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from benchmarks.random_model import make_random_model
from verl.checkpoint_engine.memory.publishing import copy_values
from verl.checkpoint_engine.plan.types import Box, Shard, TensorSpec

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


class RecordedRank:
    """The weight source of one rank that holds a block of rows of every tensor of recorded versions."""

    def __init__(self, directory: Path, rank: int, world_size: int) -> None:
        self._directory, self._version = directory, 0
        self._specs = [
            TensorSpec(name=name, shape=tuple(shape), dtype="bfloat16")
            for name, shape in json.loads((directory / "specs.json").read_text())
        ]
        self._boxes: dict[str, Box] = {}
        self._rows: dict[str, torch.Tensor] = {}
        for spec in self._specs:
            per_rank = -(-spec.shape[0] // world_size)
            start, stop = (min(edge * per_rank, spec.shape[0]) for edge in (rank, rank + 1))
            self._boxes[spec.name] = Box((start, *(0 for _ in spec.shape[1:])), (stop, *spec.shape[1:]))
            self._rows[spec.name] = torch.empty(self._boxes[spec.name].shape, dtype=torch.bfloat16)
        self._load()

    @property
    def versions(self) -> int:
        return len(list(self._directory.glob("version-*.bin")))

    def step(self) -> None:
        """Take over the next version; after the last one the one before it, and so on: it is as far away."""
        self._version += 1
        self._load()

    def _load(self) -> None:
        turn = self._version % (2 * self.versions - 2)
        number = min(turn, 2 * self.versions - 2 - turn)
        whole = np.memmap(self._directory / f"version-{number}.bin", np.int16, "r")
        start = 0
        for spec in self._specs:
            box, row = self._boxes[spec.name], spec.nbytes // 2 // spec.shape[0]
            part = whole[start + box.start[0] * row : start + box.stop[0] * row]
            self._rows[spec.name].view(torch.int16).reshape(-1).numpy()[:] = part
            start += spec.nbytes // 2

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def shards(self) -> list[Shard]:
        return [Shard(name, box) for name, box in self._boxes.items() if box.numel]

    def view(self, shard: Shard) -> torch.Tensor | None:
        values = self._values(shard)
        return values if values.is_contiguous() else None

    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        copy_values(destination, self._values(shard))

    def _values(self, shard: Shard) -> torch.Tensor:
        first = self._boxes[shard.name].start[0]
        rows = self._rows[shard.name][shard.box.start[0] - first : shard.box.stop[0] - first]
        return rows[(slice(None), *map(slice, shard.box.start[1:], shard.box.stop[1:]))]
