"""Damaged bytes, hanging and killed processes: a sync ends in time and says who it was; nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.checkpoint_engine.fakes import Through, arenas_in, soon, spare_slot
from tests.weight_sync.conftest import CASES, Line
from tests.weight_sync.expected import expected_on_rank, same_bits
from tests.weight_sync.greedy import greedy_tokens, hugging_face_tokens
from tests.weight_sync.trainers import CONFIG, NUM_RANKS, LocalTrainer, PlainTrainerOnRay
from tests.workers.rollout.test_death import server_process
from verl.checkpoint_engine.errors import (
    ActivationError,
    IntegrityError,
    SyncAborted,
    TransportError,
    TransportTimeout,
)
from verl.checkpoint_engine.memory.committed import Committed, committed_version
from verl.checkpoint_engine.plan.layout import Layout
from verl.workers.rollout import RolloutReplica

DAMAGED = "model.layers.1.mlp.down_proj.weight"
PUBLISH_S = 12.0
"""Far below the deadlines of `CONFIG`."""


class BreakableReplica(Through):
    @property
    def node_index(self) -> int:
        return self.member.node_index


def flip_last_byte(slot: Path, trainer: LocalTrainer, name: str) -> None:
    layout = Layout.of(trainer.source.specs())
    index = layout.index[name]
    with slot.open("r+b") as file:
        file.seek(layout.offsets[index] + layout.specs[index].nbytes - 1)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def last_piece(trainer: LocalTrainer, name: str) -> str:
    """How an error names the piece with the last byte of `name`: the rows of the last rank."""
    rows, columns = trainer.model.get_parameter(name).shape
    return f"{name}[{rows // NUM_RANKS}:{rows}, 0:{columns}]"


async def until(condition: Callable[[], bool]) -> None:
    assert await asyncio.to_thread(soon, condition)


def owner_of(arena: Path) -> psutil.Process:
    """The process that holds the arena's lock."""
    lock, owners = str(arena / "lock"), []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            owners += [process for file in process.open_files() if file.path == lock]
    (owner,) = owners
    return owner


def current_slot(shm_dir: Path) -> Path:
    (arena,) = arenas_in(shm_dir)
    committed = msgspec.msgpack.decode((arena / "current").read_bytes(), type=Committed)
    return arena / committed.slot


def slots(shm_dir: Path) -> set[Path]:
    (arena,) = arenas_in(shm_dir)
    return {path for path in arena.glob("slot-*") if path.suffix != ".manifest"}


def uncommitted_slots(shm_dir: Path) -> set[Path]:
    """One while a sync writes into it; before the second commit also the one that was never used."""
    return {slot for slot in slots(shm_dir) if not Path(f"{slot}.manifest").exists()}


@pytest.fixture
def llama(llama_line: Line) -> LocalTrainer:
    assert isinstance(llama_line.trainer, LocalTrainer)
    return llama_line.trainer


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
class TestBytes:
    async def test_a_byte_that_flips_before_verification_aborts_the_sync_and_vllm_serves_the_old_version(
        self, llama_line: Line, llama: LocalTrainer
    ):
        replica = llama_line.replica
        old = (await llama.train_and_sync()).version
        tokens = await greedy_tokens(replica, old)
        llama.node.before["verify"] = lambda: flip_last_byte(spare_slot(llama.shm_dir), llama, DAMAGED)
        try:
            with pytest.raises(SyncAborted) as raised:
                await llama.train_and_sync()
        finally:
            llama.node.before.clear()
        cause = raised.value.__cause__
        assert isinstance(cause, IntegrityError)
        assert (cause.version, cause.phase, cause.member) == (old + 1, "verify", "node-0")
        assert last_piece(llama, DAMAGED) in str(raised.value)
        assert f"from trainer-{NUM_RANKS - 1}" in str(raised.value)
        assert llama.manager.version == old
        assert await greedy_tokens(replica, old) == tokens
        await llama.sync()
        assert await greedy_tokens(replica, llama.version) == hugging_face_tokens(llama.model) != tokens

    async def test_a_byte_that_flips_in_the_committed_version_keeps_a_replica_from_loading_it(
        self, llama_line: Line, llama: LocalTrainer
    ):
        replica = llama_line.replica
        version = (await llama.train_and_sync()).version
        await llama.manager.remove_replicas([replica])
        current = current_slot(llama.shm_dir)
        flip_last_byte(current, llama, DAMAGED)
        with pytest.raises(ActivationError) as raised:
            await llama.manager.add_replicas([replica])
        assert isinstance(raised.value.__cause__, IntegrityError)
        assert last_piece(llama, DAMAGED) in str(raised.value)
        assert raised.value.member == replica.name
        assert (llama.manager.replicas, llama.manager.quarantined) == ([], [replica])
        flip_last_byte(current, llama, DAMAGED)  # back
        await llama.manager.add_replicas([replica])
        assert (llama.manager.replicas, llama.manager.quarantined) == ([replica], [])
        assert await greedy_tokens(replica, version) == hugging_face_tokens(llama.model)


# --- replicas ---------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
async def test_vllm_killed_while_it_loads_is_quarantined_and_comes_back_from_the_arena_without_the_trainer(
    llama_line: Line, llama: LocalTrainer, hf: RolloutReplica
):
    line = llama_line
    replica = BreakableReplica(line.replica)
    await llama.train_and_sync()
    await llama.manager.add_replicas([hf, replica])
    server = await server_process(line.replica)
    (core,) = [process for process in server.children(recursive=True) if "EngineCore" in process.name()]

    def freeze_and_kill_soon() -> None:
        """So that it has the call to load, and dies before it has answered."""
        core.suspend()
        asyncio.get_running_loop().call_later(0.5, core.kill)

    replica.before["activate"] = freeze_and_kill_soon
    try:
        report = await llama.train_and_sync()
        assert report.replicas_updated == (hf.name,)
        assert report.replicas_quarantined == (replica.name,)
        expected = hugging_face_tokens(llama.model)
        assert await greedy_tokens(hf, report.version) == expected
        with pytest.raises(ActivationError, match="the engine died") as raised:
            await llama.manager.add_replicas([replica])
        assert raised.value.member == replica.name

        replica.before.clear()
        await line.replica.launch_servers()
        calls = [list(rank.calls) for rank in llama.ranks]
        await llama.manager.add_replicas([replica])
        assert [rank.calls for rank in llama.ranks] == calls
        assert await greedy_tokens(line.replica, report.version) == expected
        (found,) = line.replica.served_weights(report.version)
        weights = expected_on_rank(llama.weights(), line.config, 0, CASES["llama"].ranks)
        assert all(same_bits(found[name], weight) for name, weight in weights.items())
    finally:
        await llama.manager.remove_replicas([hf])
        await llama.manager.add_replicas([line.replica])


async def test_the_only_replica_killed_while_it_loads_aborts_the_sync_and_can_be_restarted_with_the_old_version(
    own_shm_dir: Path, model_paths: dict[str, Path], hf: RolloutReplica
):
    trainer = LocalTrainer(model_paths["llama"], "float32", own_shm_dir / "llama")
    replica = BreakableReplica(hf)
    try:
        await trainer.manager.add_replicas([replica])
        old = (await trainer.train_and_sync()).version
        tokens = await greedy_tokens(hf, old)
        server = await server_process(hf)
        replica.before["activate"] = server.kill
        with pytest.raises(SyncAborted) as raised:
            await trainer.train_and_sync()
        assert isinstance(raised.value.__cause__, ActivationError)
        assert (raised.value.phase, raised.value.member) == ("activate", hf.name)
        assert "died" in str(raised.value)
        (arena,) = arenas_in(trainer.shm_dir)
        assert (committed_version(arena), trainer.manager.version) == (old, old)

        replica.before.clear()
        await hf.launch_servers()
        await trainer.manager.add_replicas([replica])
        assert await greedy_tokens(hf, old) == tokens
        await trainer.sync()
        assert await greedy_tokens(hf, trainer.version) == hugging_face_tokens(trainer.model)
    finally:
        await trainer.close()


# --- trainer ranks, nodes --------------------------------------------------------------------------------------------


async def test_a_trainer_rank_that_hangs_or_is_killed_while_it_publishes_aborts_the_sync_in_time(
    own_shm_dir: Path, model_paths: dict[str, Path], hf: RolloutReplica
):
    config = replace(CONFIG, deadlines=replace(CONFIG.deadlines, publish_s=PUBLISH_S))
    trainer = PlainTrainerOnRay(model_paths["llama"], own_shm_dir, config)
    try:
        await trainer.manager.add_replicas([hf])
        old = (await trainer.sync()).version
        tokens = await greedy_tokens(hf, old)
        rank = psutil.Process(trainer.group.processes[1].pid)

        trainer.train()
        rank.suspend()
        began = time.monotonic()
        with pytest.raises(SyncAborted) as raised:
            await trainer.sync()
        assert time.monotonic() - began >= PUBLISH_S
        assert isinstance(raised.value.__cause__, TransportTimeout)
        assert f"trainer-1 not done within {PUBLISH_S} s; done: trainer-0" in str(raised.value)
        assert raised.value.phase == "publish"
        assert await greedy_tokens(hf, old) == tokens

        rank.resume()
        new = (await trainer.sync()).version
        tokens_of_new = await greedy_tokens(hf, new)
        assert tokens_of_new != tokens

        trainer.train()
        rank.suspend()
        syncing = asyncio.ensure_future(trainer.sync())
        await until(lambda: bool(uncommitted_slots(own_shm_dir)))
        await asyncio.sleep(0.3)
        rank.kill()
        with pytest.raises(SyncAborted) as raised:
            await syncing
        assert isinstance(raised.value.__cause__, TransportError)
        assert not isinstance(raised.value.__cause__, TransportTimeout)  # noticed, not waited for
        assert (raised.value.phase, raised.value.member) == ("publish", "trainer-1")
        assert "its process is gone" in str(raised.value)
        assert await greedy_tokens(hf, new) == tokens_of_new
    finally:
        await trainer.close()
    assert arenas_in(own_shm_dir) == []


async def test_a_killed_checkpoint_engine_worker_is_named_and_the_next_run_starts_clean(
    own_shm_dir: Path, model_paths: dict[str, Path], hf: RolloutReplica
):
    trainer = PlainTrainerOnRay(model_paths["llama"], own_shm_dir, CONFIG)
    try:
        await trainer.manager.add_replicas([hf])
        old = (await trainer.sync()).version
        tokens = await greedy_tokens(hf, old)
        (arena,) = arenas_in(own_shm_dir)
        owner_of(arena).kill()
        trainer.train()
        with pytest.raises(SyncAborted) as raised:
            await trainer.sync()
        assert isinstance(raised.value.__cause__, TransportError)
        assert not isinstance(raised.value.__cause__, TransportTimeout)  # noticed, not waited for
        assert (raised.value.phase, raised.value.member) == ("publish", "node-0")
        assert "its process is gone" in str(raised.value)
        assert await greedy_tokens(hf, old) == tokens
        await trainer.manager.close()
        await until(lambda: arenas_in(own_shm_dir) == [])

        trainer.start_sync()  # of the same job: nothing of the old arena is in the way
        await trainer.manager.add_replicas([hf])
        new = (await trainer.sync()).version
        assert await greedy_tokens(hf, new) != tokens
    finally:
        await trainer.close()
