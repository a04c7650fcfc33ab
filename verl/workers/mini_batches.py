"""The order in which a trainer rank walks through its part of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import torch

from verl.protocol import DataProto
from verl.utils.config import ConfigError
from verl.workers.config import ActorConfig, CriticConfig


def mini_batch_size_per_rank(prompts: int, responses_per_prompt: int, world_size: int) -> Fraction:
    """Sequences of one mini-batch on one rank, on average. Raises ConfigError if some rank would have none."""
    sequences = prompts * responses_per_prompt
    if sequences < world_size:
        raise ConfigError(
            f"ppo_mini_batch_size={prompts} x rollout.n={responses_per_prompt} = {sequences} sequences "
            f"are fewer than {world_size} trainer ranks"
        )
    return Fraction(sequences, world_size)


def shuffler(seed: int, rank: int, data: DataProto) -> torch.Generator:
    """The generator that shuffles `data` on this rank: another order in each step, the same if a step is repeated."""
    step = int(data.meta_info.get("global_steps", 0))
    return torch.Generator().manual_seed(seed + rank + step * 1_000_003)


def num_mini_batches(num_sequences: int, config: ActorConfig | CriticConfig, size: Fraction | int) -> int:
    """The number of mini-batches of `iterate_mini_batches`."""
    whole = Fraction(size).denominator == 1
    return config.ppo_epochs * (math.ceil(num_sequences / size) if whole else max(1, int(num_sequences / size)))


def iterate_mini_batches(
    data: DataProto, config: ActorConfig | CriticConfig, *, size: Fraction | int, generator: torch.Generator
) -> Iterator[DataProto]:
    """`ppo_epochs` passes over `data` in mini-batches of `size` sequences, in order unless `shuffle`.

    Every rank gets the same number of mini-batches, as all hold equally many sequences; the last one of a pass may be
    shorter. A `size` that is no whole number gives mini-batches that differ by one sequence at most.
    """
    for _ in range(config.ppo_epochs):
        if config.shuffle:
            data = data[torch.randperm(len(data), generator=generator)]
        if Fraction(size).denominator == 1:
            yield from data.split(int(size))
        else:
            for rows in torch.arange(len(data)).tensor_split(max(1, int(len(data) / size))):
                yield data[rows]
