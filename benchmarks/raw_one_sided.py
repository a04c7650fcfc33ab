"""What NIXL and Mooncake can do by themselves: large contiguous reads between two processes of this machine.

python -m benchmarks.raw_one_sided --size-gib 1 --stage
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from verl import envs
from verl.checkpoint_engine.backends.one_sided import UInt8s, Wire
from verl.checkpoint_engine.config import CheckpointEngineConfig

TRANSFER_NBYTES = 64 * 2**20
IN_FLIGHT = 4


def nixl_wire(name: str) -> Wire:
    from verl.checkpoint_engine.backends.nixl import NixlWire

    if name == "owner":
        return NixlWire(name, tls=None, error_handling="peer", num_workers=1, progress=True)
    return NixlWire(name, tls="sm,self", error_handling="none", num_workers=1, progress=False)


def mooncake_wire(name: str) -> Wire:
    from verl.checkpoint_engine.backends.mooncake import MooncakeWire

    return MooncakeWire(host="127.0.0.1", protocol="tcp", devices="")


WIRES: dict[str, Callable[[str], Wire]] = {"nixl": nixl_wire, "mooncake": mooncake_wire}


def nixl_read_gbps(nbytes: int, *, repeats: int = 3) -> list[float]:
    """GB/s of reading `nbytes` of another process's memory into shared memory with NIXL, per repeat."""
    with ReadPair("nixl", nbytes) as pair:
        return [pair.gbytes_per_s() for _ in range(repeats)]


def mooncake_read_gbps(nbytes: int, *, repeats: int = 3) -> list[float]:
    """GB/s of reading `nbytes` of another process's memory into shared memory with Mooncake, per repeat."""
    with ReadPair("mooncake", nbytes) as pair:
        return [pair.gbytes_per_s() for _ in range(repeats)]


class ReadPair:
    """This process and one that owns `nbytes`, both registered once, as the engine does it. Close it."""

    def __init__(self, library: str, nbytes: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_own, args=(theirs, library, nbytes), name=f"raw-{library}", daemon=True)
        self._process.start()
        theirs.close()
        self._slot = _shared_memory(nbytes)
        self._wire = WIRES[library]("node")
        self._wire.register(self._slot)
        address, self._source = self._pipe.recv()
        self._wire.connect(0, address, 30.0)
        self.gbytes_per_s()

    def gbytes_per_s(self) -> float:
        start_s = time.perf_counter()
        starts = list(range(0, len(self._slot), TRANSFER_NBYTES))[::-1]
        flying: list[Any] = []
        while starts or flying:
            while starts and len(flying) < IN_FLIGHT:
                start = starts.pop()
                nbytes = min(TRANSFER_NBYTES, len(self._slot) - start)
                flying.append(self._wire.read(0, self._source + start, self._slot.ctypes.data + start, nbytes))
            left = [transfer for transfer in flying if not self._wire.is_done(transfer)]
            if len(left) == len(flying):
                time.sleep(0.0002)
            flying = left
        return len(self._slot) / (time.perf_counter() - start_s) / 1e9

    def close(self) -> None:
        self._wire.close()
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def __enter__(self) -> ReadPair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _own(pipe: Connection, library: str, nbytes: int) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    memory: UInt8s = np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    memory[:] = 7
    wire = WIRES[library]("owner")
    wire.register(memory)
    pipe.send((wire.address(), memory.ctypes.data))
    try:
        pipe.recv()
    except EOFError:
        wire.close()


def _shared_memory(nbytes: int) -> UInt8s:
    path = Path(envs.shm_dir()) / f"verl-raw-{os.getpid()}"
    with path.open("w+b") as file:
        path.unlink()
        os.posix_fallocate(file.fileno(), 0, nbytes)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory: UInt8s = np.frombuffer(mmap.mmap(file.fileno(), nbytes, flags=flags), np.uint8)
    return memory


async def stage_beside_raw(library: str, nbytes: int, trainers: int, repeats: int) -> dict[str, Any]:
    """Stage rates of the backend and, right before each, the library's own: both see the same machine."""
    from benchmarks.rank_process import RankProcess
    from benchmarks.synthetic_model import qwen_like_specs
    from verl.checkpoint_engine.manager import CheckpointEngineManager
    from verl.checkpoint_engine.participants import RolloutNode

    specs = qwen_like_specs(nbytes, "bfloat16")
    size = sum(spec.nbytes for spec in specs)
    config = CheckpointEngineConfig(backend=library, engine_kwargs={"mooncake": {"host": "127.0.0.1"}})
    ranks = [RankProcess(rank, trainers, specs, "bfloat16", config) for rank in range(trainers)]
    node = RolloutNode(0, config, job=f"raw-{os.getpid()}", shm_dir=envs.shm_dir())
    manager = CheckpointEngineManager(config=config, trainers=ranks, nodes=[node])
    raw, stage, verify = [], [], []
    try:
        with ReadPair(library, size) as pair:
            for version in range(2 + repeats):
                before = pair.gbytes_per_s()
                report = await manager.update_weights(version)
                if version >= 2:
                    raw.append((before + pair.gbytes_per_s()) / 2)
                    stage.append(size / report.phase_s["stage"] / 1e9)
                    verify.append(report.phase_s["verify"])
    finally:
        await manager.close()
        for rank in ranks:
            await rank.close()
    ratios = [rate / ceiling for rate, ceiling in zip(stage, raw, strict=True)]
    return {
        "raw_gbytes_per_s": raw,
        "stage_gbytes_per_s": stage,
        "median_raw": median(raw),
        "median_stage": median(stage),
        "stage_over_raw": median(ratios),
        "verify_s": median(verify),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=[*WIRES, "all"], default="all")
    parser.add_argument("--size-gib", type=float, default=1.0)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stage", action="store_true", help="also run the backend, raw and stage in turn")
    arguments = parser.parse_args()
    nbytes = int(arguments.size_gib * 2**30)
    for library in WIRES if arguments.library == "all" else [arguments.library]:
        if arguments.stage:
            result = asyncio.run(stage_beside_raw(library, nbytes, arguments.trainers, arguments.repeats))
        else:
            rates = {"nixl": nixl_read_gbps, "mooncake": mooncake_read_gbps}[library](nbytes, repeats=arguments.repeats)
            result = {"raw_gbytes_per_s": rates, "median_raw": median(rates)}
        print(json.dumps({library: result}, indent=2))


if __name__ == "__main__":
    main()
