"""The order of samples, epoch after epoch."""

from __future__ import annotations

from collections.abc import Iterator

import torch


class EpochSampler(torch.utils.data.Sampler[int]):
    """Every sample once per epoch, in an order that depends on seed and epoch alone.

    torchdata's own random sampler goes on differently after a restart and with another number of loader processes,
    because it draws each epoch's order from a generator whose state depends on what else drew from it. An epoch ends
    when its iterator is exhausted; one left early starts again.
    """

    def __init__(self, size: int, *, seed: int, shuffle: bool) -> None:
        self.epoch = 0
        self._size = size
        self._seed = seed
        self._shuffle = shuffle

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> EpochIterator:
        return EpochIterator(self)

    def order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._size))
        generator = torch.Generator().manual_seed(self._seed + epoch * 1_000_003)
        return torch.randperm(self._size, generator=generator).tolist()


class EpochIterator(Iterator[int]):
    """One epoch. Its state is two integers; restoring it also takes the sampler to that epoch."""

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler
        self._epoch = sampler.epoch
        self._position = 0
        self._order = sampler.order(self._epoch)

    def __next__(self) -> int:
        if self._position == len(self._order):
            self._sampler.epoch = self._epoch + 1
            raise StopIteration
        self._position += 1
        return self._order[self._position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._sampler.order(self._epoch)
        # A loader that was saved between epochs restores the old iterator and then asks the sampler for a new one.
        self._sampler.epoch = self._epoch + (self._position == len(self._order))
