"""What lets a peer that reads memory know whether the checkpoint that it wants is still there.

A page of numbers that lives as long as its owner, one for each registered checkpoint. Peers read the number before and
after the checkpoint itself. Host memory is used again for the next checkpoint of the same layout, so an answer that
still says the number means that the bytes in between are the right ones.
"""

from __future__ import annotations

import mmap
import secrets

import numpy as np
import torch

from verl.checkpoint_engine.errors import ConfigError


class Stamps:
    def __init__(self) -> None:
        self.memory = torch.from_numpy(np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64))
        """To be registered with the P2P store."""

    def take(self) -> tuple[int, int]:
        """(address, number) for a checkpoint that is now complete."""
        free = (self.memory == 0).nonzero()
        if not len(free):
            raise ConfigError(f"more than {len(self.memory)} checkpoints are registered: unregister some")
        place = int(free[0])
        self.memory[place] = secrets.randbits(62) | 1
        return self.memory.data_ptr() + place * self.memory.itemsize, int(self.memory[place])

    def give_back(self, address: int) -> None:
        """The checkpoint is about to change."""
        self.memory[(address - self.memory.data_ptr()) // self.memory.itemsize] = 0
