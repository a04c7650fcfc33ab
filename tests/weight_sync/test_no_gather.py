"""Publishing asks for no memory for more than it copies at a time. That it gathers nothing: test_bit_equality."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.weight_sync.trainers import CONFIG, NUM_RANKS
from tests.workers.engine.engine_cases import make_engine
from tests.workers.engine.megatron_cases import PP2, TP2, make_megatron
from tests.workers.engine.rank_pool import RankPool
from verl.checkpoint_engine.backends.naive import NaiveEngine
from verl.checkpoint_engine.memory.arena import NodeArena
from verl.checkpoint_engine.memory.digest import Manifest, digest_pieces, verify
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import make_plan
from verl.checkpoint_engine.plan.types import Member
from verl.utils.builtin import make_tiny_model

ALLOWANCE = 4 * CONFIG.block_nbytes
M_MMAP_THRESHOLD = -3
"""glibc's number for the size from which memory is taken from and given back to the kernel."""


@pytest.fixture(scope="module")
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool(NUM_RANKS)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "fsdp"},
        {"strategy": "fsdp2"},
        {"strategy": "fsdp2", "model": {"lora_rank": 8}},
        {"strategy": "megatron", **TP2},
        {"strategy": "megatron", **PP2},
    ],
    ids=["fsdp", "fsdp2", "lora", "megatron-tp", "megatron-pp"],
)
def test_publishing_takes_no_memory_beside_the_slot_but_a_few_blocks(
    rank_pool: RankPool, tmp_path: Path, own_shm_dir: Path, options: dict[str, Any]
):
    """The kernel refuses more. Measured on the host, where shared memory does not count; a device is not looked at."""
    path = make_tiny_model(tmp_path / "model", "qwen3", hidden_size=256, intermediate_size=2048, layers=4)
    for own_nbytes, refused in rank_pool.run(publish_under_a_limit, NUM_RANKS, path, options, own_shm_dir):
        assert own_nbytes > 5 * ALLOWANCE  # a copy of the rank's own shards would not have fitted, let alone the model
        assert refused, "the limit had no force"


def publish_under_a_limit(path: Path, options: dict[str, Any], shm_dir: Path) -> tuple[int, bool]:
    """On every rank: the bytes of its own shards at the rollout dtype, and whether a copy of them was refused."""
    ctypes.CDLL(None).mallopt(
        M_MMAP_THRESHOLD, 64 * 1024
    )  # what is freed is given back, and not there to be used again
    is_megatron = options["strategy"] == "megatron"
    own = {name: value for name, value in options.items() if name != "strategy"}
    engine = make_megatron(path, own) if is_megatron else make_engine(path, **options)
    rank, source = dist.get_rank(), engine.weight_source("bfloat16")
    layout = Layout.of(source.specs())
    tables = [ShardTable.decode(table) for table in everywhere(ShardTable.of(layout, source.shards()).encode())]
    plan = make_plan(layout, tables, block_nbytes=CONFIG.block_nbytes)
    backend = NaiveEngine(member=Member(role="trainer", index=rank, host=""), config=CONFIG)
    backend.prepare(plan, None)
    trainers = [Member(role="trainer", index=index, host="") for index in range(NUM_RANKS)]
    backend.init_process_group(NaiveEngine.build_topology(trainers, [Member(role="node", index=0, host="")]))
    with ExitStack() as stack:
        arena, slot = None, ""
        if rank == 0:
            arena = stack.enter_context(
                NodeArena.create(shm_dir=shm_dir, job="test", node="0", layout=layout, slots=CONFIG.slots)
            )
            slot = str(arena.begin(1))
        slot = everywhere(slot)[0]
        backend.send_weights(1, source, {"node-0": slot})  # libraries take memory at their first use, and keep it
        with little_memory(ALLOWANCE):
            publication = backend.send_weights(1, source, {"node-0": slot})
            refused = not fits(publication.nbytes)
        digests = everywhere(digest_pieces(publication.memory.bytes.numpy(), publication.memory.extents))
        if arena is not None:
            verify(arena.slot_view().bytes.numpy(), Manifest.of(1, plan, digests))
        backend.finalize()
        dist.barrier()
    return publication.nbytes, refused


def fits(nbytes: int) -> bool:
    """Whether a copy would fit, block by block as a publish would make it."""
    try:
        [torch.empty(CONFIG.block_nbytes, dtype=torch.uint8) for _ in range(nbytes // CONFIG.block_nbytes)]
    except RuntimeError:
        return False
    return True


@contextmanager
def little_memory(more_nbytes: int) -> Iterator[None]:
    """Limit this process to the private memory that it has and `more_nbytes`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = [line.split()[1] for line in lines if line.startswith("VmData:")]
    unlimited = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(kibibytes) * 1024 + more_nbytes, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, unlimited)


def everywhere(own: Any) -> list[Any]:
    """What every rank passes, by rank."""
    parts: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(parts, own)
    return parts
