"""Ranks of a ParameterServer in processes of their own, each with an engine that may misbehave.

The processes are forked by a server that has torch loaded, so that one takes a fraction of a second to start.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.free_ports import free_port
from benchmarks.processes import Member
from tests import forked
from tests.checkpoint_engine.member_processes import resources
from tests.checkpoint_engine.parameter_server.link_process import link_sockets
from verl.checkpoint_engine.parameter_server import update_weights_from_ipc
from verl.checkpoint_engine.parameter_server.engine_receiver import IncomingWeights
from verl.checkpoint_engine.parameter_server.metas import load_metas, save_metas
from verl.checkpoint_engine.parameter_server.server import ParameterServer

BUCKET_GB = 2**-11
"""512 KiB: a part of the checkpoint has several buckets."""
PATIENCE_S = 60.0


def part_of(rank: int, version: int) -> dict[str, torch.Tensor]:
    """What `rank` holds: 1.5 MiB of mixed shapes and dtypes."""
    generator = torch.Generator().manual_seed(100 * version + rank)
    rows = torch.randint(0, 2**30, (6, 256, 240), dtype=torch.int32, generator=generator)
    return {
        **{f"rank{rank}.layer{index}": layer for index, layer in enumerate(rows)},
        f"rank{rank}.half": torch.randn(33, 7, generator=generator).to(torch.bfloat16),
        f"rank{rank}.scalar": torch.tensor(float(version + rank), dtype=torch.float64),
        f"rank{rank}.empty": torch.zeros(0, 5),
    }


def whole(ranks: Sequence[int], version: int) -> dict[str, torch.Tensor]:
    return {name: tensor for rank in ranks for name, tensor in part_of(rank, version).items()}


# --- in the processes -------------------------------------------------------------------------------------------------


class Rank:
    """A ParameterServer, and the engine that it feeds."""

    def __init__(self, rank: int, world_size: int, master: str | None, options: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        os.environ["PS_MAX_BUCKET_SIZE_GB"] = str(BUCKET_GB)
        self.server = ParameterServer(rank=rank, world_size=world_size, master=master, **{"timeout_s": 60.0, **options})
        self.loaded: dict[str, torch.Tensor] = {}

    def register(self, name: str, version: int) -> None:
        self.server.register_checkpoint(name, named_tensors=part_of(self.server.rank, version))

    def unregister(self, name: str) -> None:
        self.server.unregister_checkpoint(name)

    def gather(self, name: str) -> int:
        self.server.gather_metas(name)
        return len(self.server.get_metas())

    def save(self, path: Path, name: str) -> None:
        save_metas(path, name, self.server.get_metas())

    def load(self, path: Path) -> str:
        name, metas = load_metas(path)
        self.server.load_metas(metas)
        return name

    def connect(self, ranks: Sequence[int]) -> None:
        self.server.init_process_group_for_ranks(ranks)

    def update(
        self,
        name: str,
        ranks: Sequence[int] | None = None,
        engine: str = "loads",
        memory_for: float | None = None,
        within_s: float | None = None,
    ) -> Any:
        """The report of an update into an engine that behaves as the method of that name.

        `memory_for`: so many of the largest tensor are all the memory that the rank may use. `within_s`: its deadline,
        if another than that of the server's other calls.
        """
        self.loaded.clear()
        self.server.mem_fraction = 0.9
        if memory_for is not None:
            largest = max(tensor.nbytes for tensor in part_of(0, 0).values())
            self.server.mem_fraction = memory_for * largest / self.server._device.free_nbytes()
        timeout = timedelta(seconds=within_s) if within_s else None
        return self.server.update(name, getattr(self, engine), ranks, timeout=timeout)

    def run_as_with_checkpoint_engine(self, version: int) -> list[int]:
        """The calls of a script that was written for checkpoint-engine; how many tensors came in which bucket."""
        server, minute = self.server, timedelta(minutes=1)
        buckets: list[int] = []

        def request(paths: list[tuple[str, str]]) -> None:
            update_weights_from_ipc(
                None, dict(paths)[server.device_id], 0, run=run, post_hook=lambda: buckets.append(0)
            )

        def run(weights: list[tuple[str, torch.Tensor]]) -> None:
            buckets.append(len(weights))
            self.loaded |= {name: tensor.clone() for name, tensor in weights}

        self.loaded.clear()
        server.init_process_group(timeout=minute)
        dist.barrier()
        dist.destroy_process_group()
        parts = part_of(server.rank, version)
        server.register_checkpoint("script", files=None, named_tensors=parts, use_inplace_pin_memory=False)
        server.gather_metas(checkpoint_name="script")
        server.store_based_barrier(timeout=minute)
        server.update(checkpoint_name="script", req_func=request, timeout=minute, ranks=[])
        server.unregister_checkpoint("script", force=True)
        return buckets

    def wrong(self, version: int, ranks: Sequence[int]) -> list[str]:
        """Names that the engine has not, should not have, or has with other bytes, dtype or shape."""
        expected = whole(ranks, version)
        return [
            name
            for name in expected.keys() | self.loaded.keys()
            if name not in expected
            or name not in self.loaded
            or self.loaded[name].dtype != expected[name].dtype
            or not torch.equal(self.loaded[name], expected[name])
        ]

    def resources(self) -> dict[str, int]:
        """What of this process somebody else could run out of. Threads and sockets of an update are gone soon."""
        mapped = sum("verl-parameter-server" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return resources() | {"links": len(link_sockets(os.getpid())), "mapped": mapped}

    def close(self) -> None:
        self.server.close()

    # --- engines

    def _weights(self, paths: list[tuple[str, str]]) -> IncomingWeights:
        return IncomingWeights(dict(paths)[self.server.device_id], "cpu", PATIENCE_S)

    def loads(self, paths: list[tuple[str, str]]) -> None:
        with self._weights(paths) as weights:
            self.loaded = {name: tensor.clone() for name, tensor in weights.tensors()}

    def _during(self, number: int, paths: list[tuple[str, str]], act: Callable[[], None]) -> None:
        """Take all tensors, and do something before tensor `number` is done with."""
        with self._weights(paths) as weights:
            for position, _ in enumerate(weights.tensors()):
                if position == number:
                    act()

    def holds(self, paths: list[tuple[str, str]]) -> None:
        """Does not let go of the first bucket before the next ones are on their way."""

        def on_their_way() -> bool:
            """Bucket 1 has been broadcast, and who fetches any has fetched two."""
            kinds = [event.kind for event in self.server.events]
            return kinds.count("broadcast-end") >= 2 and kinds.count("fetch-end") != 1

        def wait() -> None:
            end = time.monotonic() + PATIENCE_S
            while not on_their_way():
                if time.monotonic() > end:
                    raise TimeoutError(f"nothing went on meanwhile: {self.server.events}")
                time.sleep(0.01)

        self._during(0, paths, wait)

    def refuses(self, paths: list[tuple[str, str]]) -> None:
        def act() -> None:
            raise ValueError("a tensor does not fit")

        self._during(2, paths, act)

    def dies(self, paths: list[tuple[str, str]]) -> None:
        """And the rank with it."""
        self._during(2, paths, lambda: signal.raise_signal(signal.SIGKILL))

    def stalls(self, paths: list[tuple[str, str]]) -> None:
        self._during(2, paths, lambda: signal.raise_signal(signal.SIGSTOP))

    def is_down(self, paths: list[tuple[str, str]]) -> None:
        raise ConnectionError("http://engine:8000 refused the connection")

    def is_silent(self, paths: list[tuple[str, str]]) -> None:
        time.sleep(PATIENCE_S)


# --- in the test ------------------------------------------------------------------------------------------------------


class RankProcess(Member):
    """One rank; `submit` returns futures, which are answered in order."""

    def __init__(self, rank: int, world_size: int, master: str | None, **options: Any) -> None:
        self.rank = rank
        forked.start_server()
        super().__init__(f"rank-{rank}", partial(Rank, rank, world_size, master, options))

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> None:
        self._process.kill()
        super().end()


class World:
    """All ranks of one job."""

    def __init__(self, size: int, **options: Any) -> None:
        place = f"127.0.0.1:{free_port()}"
        self.ranks = [RankProcess(rank, size, place, **options) for rank in range(size)]

    def all(self, method: str, *values: Any, only: Sequence[int] | None = None, **options: Any) -> list[Any]:
        """What every rank answers, or the exception that it raises."""
        chosen = [rank for rank in self.ranks if only is None or rank.rank in only]
        futures = [rank.submit(method, *values, **options) for rank in chosen]
        return [future.exception() or future.result() for future in futures]

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()
