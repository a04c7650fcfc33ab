"""A state on three hosts that processes and keepers are lost of, without a model: what the driver gives back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from verl.checkpoint_engine.plan.types import Box
from verl.checkpoint_engine.support.loop_thread import LoopThread
from verl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    register,
)
from verl.trainer.fleet.memory_checkpoint import MemoryCheckpoint
from verl.workers.engine.snapshots import Place, Places, State, copy_into
from verl.workers.memory_checkpoint.worker import RememberedWorker

ROWS, COLUMNS = 24, 100_003
SETTLED_S = 240.0


class Remembering(RememberedWorker):
    """A rank with some rows of one tensor."""

    def __init__(self) -> None:
        self._rows = range(self.rank * ROWS // self.world_size, (self.rank + 1) * ROWS // self.world_size)
        self._state = {"rows": torch.zeros(len(self._rows), COLUMNS), "step": torch.tensor(0)}
        self._places = {"rows": [Place("rows", self._box, Box.whole((len(self._rows), COLUMNS)))]}

    @property
    def _box(self) -> Box:
        return Box((self._rows.start, 0), (self._rows.stop, COLUMNS))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def learn(self, step: int, seed: int) -> None:
        self.before_step()
        self._state["rows"].copy_(_values(step, seed)[self._rows.start : self._rows.stop])
        self._state["step"].fill_(step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def is_of(self, step: int, seed: int) -> bool:
        rows = _values(step, seed)[self._rows.start : self._rows.stop]
        return torch.equal(self._state["rows"], rows) and int(self._state["step"]) == step

    def snapshot(self) -> State:
        return self._state

    def restore(self, saved: State) -> None:
        copy_into(self._state, saved)

    def places(self) -> Places:
        return self._places

    def before_step(self) -> None:
        self._memory.await_copied()


def _values(step: int, seed: int) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(100 * seed + step))


class Run:
    """What a driver does with its ranks and their memory."""

    def __init__(self, loop: LoopThread, keepers: Callable[[], Sequence[int]]) -> None:
        """`keepers` tells the process ids of those that are there."""
        self.group: RayWorkerGroup | None = None
        self.memory = MemoryCheckpoint(self._present, loop, enabled=True)
        self._keepers = keepers

    def _present(self) -> RayWorkerGroup:
        assert self.group is not None
        return self.group

    def start(self, ranks: int) -> None:
        """Other ranks, on as many hosts; those before them are gone."""
        self.end()
        pool = RayResourcePool(
            process_on_nodes=[1] * ranks,
            num_cpus_per_process=0.5,
            distinct_nodes=True,
            use_accelerator=None,
            name_prefix="remembering",
            placement_timeout_s=SETTLED_S,
        )
        made = RayClassWithInitArgs(Remembering)
        self.group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, name_prefix="remembering")

    def learn(self, *steps: int, seed: int = 0, waits: bool = True) -> None:
        for step in steps:
            self._present().learn(step, seed)
            self.memory.keep(step)
            if waits:
                copying = self.memory.copying
                assert copying is not None
                copying.result(SETTLED_S)

    def lose_keeper(self) -> None:
        """As with its host."""
        pid, before = self._keepers()[0], len(self._keepers())
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + SETTLED_S
        while len(self._keepers()) == before:
            assert time.monotonic() < deadline, "the keeper lives on"
            time.sleep(0.05)

    def restored(self, ranks: int, seed: int = 0) -> tuple[int | None, bool]:
        """What other ranks get, and whether it is the state of that step."""
        self.start(ranks)
        step = self.memory.restore()
        return step, step is not None and all(self._present().is_of(step, seed))

    def end(self) -> None:
        if self.group is not None:
            self.group.shutdown(grace_s=0.0)
            self.memory.end_copying()
            self.group = None


@contextmanager
def running(keepers: Callable[[], Sequence[int]]) -> Iterator[Run]:
    loop = LoopThread("remembering")
    run = Run(loop, keepers)
    try:
        yield run
    finally:
        run.end()
        run.memory.close()
        loop.close()


def remember(keepers: Callable[[], Sequence[int]]) -> dict[str, Any]:
    """By what happens: (step, whether that is its state) of what ranks are given back."""
    found: dict[str, Any] = {}
    with running(keepers) as run:
        run.start(3)
        run.learn(1, 2)
        run.end()  # parity is there
        run.lose_keeper()
        found["a host"] = run.restored(3)
        run.learn(3)
        run.end()
        run.lose_keeper()
        found["a host, and fewer go on"] = run.restored(2)
        found["these, too"] = run.restored(2)
        run.learn(4, waits=False)
        run.lose_keeper()  # while ranks copy, or parity is added up, or after it
        found["a host, at some moment"] = run.restored(2)
        run.memory.forget()
        found["forgotten"] = run.restored(2)
        run.learn(1, seed=1)
        found["another state of the same step"] = run.restored(2, seed=1)
    found["left"] = len(keepers())
    return found
