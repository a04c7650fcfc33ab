"""The trainer's state after its last step, in memory that outlives its ranks: `trainer.memory_checkpoint`.

ranks       copy their state into the spare slots of their host's keeper, while they train on, and tell digests
keepers     commit, once every rank of the run has; so it is there whole, or it is that of the step before
keepers     copy it from each other, in a ring, where ranks are on several hosts
new ranks   digest what is there once more, and take it; on another host its keeper gets it from those that have it
fewer ranks read their parts of it from whoever has them, digest those, and take them
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.checkpoint_engine.errors import CheckpointEngineError, ConfigError, TransportError, TransportTimeout
from verl.checkpoint_engine.support import envs
from verl.checkpoint_engine.support.loop_thread import LoopThread
from verl.single_controller import RayWorkerGroup
from verl.single_controller.errors import WorkerGroupError
from verl.single_controller.future import WorkerFuture
from verl.workers.memory_checkpoint.keeper import Lent, StateKeeper
from verl.workers.memory_checkpoint.resharded import Left, StateDescription

logger = logging.getLogger(__name__)

KEEPS_WITHIN_S = 60.0
"""A keeper that has not answered by then is given up; without load it takes milliseconds."""
FREES_WITHIN_S = 10.0
"""Afterwards a keeper is killed; then what watches its memory frees it."""


MIRRORS_WITHIN_S = 300.0
"""A copy on another host that takes longer is given up: the next step waits for it."""


@dataclass(frozen=True)
class _Keeper:
    ranks: tuple[int, ...]
    node: str
    address: str
    actor: Any


@dataclass(frozen=True)
class _Holder:
    """A keeper that has the state of some ranks."""

    actor: Any
    copies: bool
    """It is that of another host."""
    ranks: tuple[int, ...]

    def lend(self, step: int, ranks: Sequence[int], **options: Any) -> Any:
        return self.actor.lend.remote(step, ranks, copies=self.copies, **options)


class MemoryCheckpoint:
    """Lives on the driver, and is used by its main thread."""

    def __init__(self, ranks: Callable[[], RayWorkerGroup], loop: LoopThread, *, enabled: bool) -> None:
        """`ranks` are the present ones."""
        self._ranks, self._loop, self._enabled = ranks, loop, enabled
        self._keepers: list[_Keeper] = []
        self._described: list[StateDescription] = []
        """By rank, of those that the keepers have memory for."""
        self._is_reserved = False
        self._copying: Future[None] | None = None
        self._mirroring: Future[None] | None = None
        self._is_mirrored: bool | None = None
        """None before it was tried."""
        self._step: int | None = None

    def start(self) -> None:
        """Start a keeper on each host with ranks, unless there is one; nobody waits for them."""
        if self._enabled and not self._keepers:
            self._keepers = self._started()

    def _started(self) -> list[_Keeper]:
        job = f"{os.getpid()}-{secrets.token_hex(4)}"
        by_node: dict[str, list[int]] = {}
        addresses: dict[str, str] = {}
        for rank, process in sorted(self._ranks().processes.items()):
            by_node.setdefault(process.node_id, []).append(rank)
            addresses[process.node_id] = process.address
        remote: Any = ray.remote(StateKeeper)

        def start(number: int, node: str) -> Any:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            return remote.options(num_cpus=0, scheduling_strategy=there).remote(
                job=f"{job}-{number}",
                shm_dir=str(envs.shm_dir()),
                address=addresses[node],
            )

        return [
            _Keeper(tuple(ranks), node, addresses[node], start(number, node))
            for number, (node, ranks) in enumerate(by_node.items())
        ]

    def keep(self, step: int) -> None:
        """Keep the state that the ranks have now, after `step`. They may go on; what they left before is there until
        all of it is."""
        if not self._enabled:
            return
        self._settle()
        try:
            self.start()
            if not self._is_reserved and not self._reserve():
                return
            slots = self._asked("begin", step)
        except (CheckpointEngineError, RayError) as exc:
            self._give_up(exc)
            return
        began = self._ranks().submit("copy_state", _by_rank(slots))
        self._copying = self._loop.start(self._commit(step, began))
        if len(self._keepers) > 1 and self._is_mirrored is not False:
            self._mirroring = self._loop.start(self._mirror(step, self._copying, self._keepers))

    @property
    def copying(self) -> Future[None] | None:
        """Done when what is being kept is there; None if nothing is being kept."""
        return self._copying

    def end_copying(self) -> None:
        """The ranks are gone: what they had not left yet is not there. Returns when that is settled."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.exception()
        self._end_mirroring()

    def restore(self) -> int | None:
        """Give the ranks, which are new, what was kept last; the step that it is of. None if nothing whole was.

        With ranks on other hosts than before that may be the step before the last one.
        """
        if self._step is None:
            return None
        is_resharded = len(self._ranks().processes) != len(self._described)
        try:
            if is_resharded:
                step = self._reshard(self._step)
            else:
                step, arenas = self._arenas(self._step)
                steps = [step] * len(arenas)
                self._ranks().check_state(arenas, steps)  # before any of them changes anything
                self._ranks().restore_state(arenas, steps)
        except (CheckpointEngineError, RayError) as exc:
            self._give_up(exc)
            return None
        if is_resharded:
            self.close()
            self.keep(step)  # as these ranks divide it
        return step

    def forget(self) -> None:
        """What is kept is of a step that the run has gone back from. A later state of the same number is another one,
        so nothing of it may stay."""
        self._settle()
        self.close()

    def close(self) -> None:
        """Free the memory, and return when it is free. Idempotent."""
        keepers, self._keepers, self._step, self._is_reserved = self._keepers, [], None, False
        self._is_mirrored = None  # other keepers have to be told what they copy
        _end(keepers)

    def _reserve(self) -> bool:
        """Have the keepers take the memory. Whether the state is kept."""
        described: list[StateDescription | None] = self._ranks().describe_state()
        self._described = [one for one in described if one is not None]
        if len(self._described) < len(described):
            self.close()
            return self._disable("its training engine has no `snapshot`")
        asked = [
            keeper.actor.reserve.remote({rank: self._described[rank].plan for rank in keeper.ranks})
            for keeper in self._keepers
        ]
        try:
            sizes: list[int] = ray.get(asked, timeout=KEEPS_WITHIN_S)
        except RayTaskError as exc:
            self.close()
            if isinstance(exc.cause, ConfigError):
                return self._disable(str(exc.cause))
            raise
        processes = self._ranks().processes
        where = ", ".join(
            f"{_told(nbytes)} on {processes[keeper.ranks[0]].address}"
            for keeper, nbytes in zip(self._keepers, sizes, strict=True)
        )
        logger.info("the training state of the last step is kept in memory: %s (trainer.memory_checkpoint)", where)
        self._is_reserved = True
        return True

    def _disable(self, why: str) -> bool:
        self._enabled = False
        logger.info("the training state is not kept in memory: %s (trainer.memory_checkpoint)", why)
        return False

    async def _commit(self, step: int, began: WorkerFuture) -> None:
        await began
        digests: list[bytes] = await self._ranks().submit("copied_state")
        for reference in [
            keeper.actor.commit.remote(step, {rank: digests[rank] for rank in keeper.ranks}) for keeper in self._keepers
        ]:
            await reference
        self._step = step

    async def _mirror(self, step: int, kept: Future[None], keepers: Sequence[_Keeper]) -> None:
        """Once `step` is kept, have each keeper copy what the one before it owns."""
        await asyncio.shield(asyncio.wrap_future(kept))
        began_s = time.monotonic()
        readers = [*keepers[1:], keepers[0]]
        lent = [
            keeper.actor.lend.remote(step, keeper.ranks, to=[reader.address], with_plans=self._is_mirrored is None)
            for keeper, reader in zip(keepers, readers, strict=True)
        ]
        read = [keeper.actor.fetch.remote(step, one) for keeper, one in zip(readers, lent, strict=True)]
        async with asyncio.timeout(MIRRORS_WITHIN_S):
            sizes: list[int] = [await reference for reference in read]
        if self._is_mirrored is None:
            told = (
                f"that of {keeper.address} on {reader.address} ({_told(nbytes)})"
                for keeper, reader, nbytes in zip(keepers, readers, sizes, strict=True)
            )
            logger.info(
                "the training state in memory is copied between hosts: %s, in %.1f s",
                ", ".join(told),
                time.monotonic() - began_s,
            )
        self._is_mirrored = True

    def _end_mirroring(self) -> None:
        """Wait until no keeper copies from another one; what could not be copied is there on its own host alone."""
        mirroring, self._mirroring = self._mirroring, None
        if mirroring is None:
            return
        try:
            mirroring.result()
        except RayTaskError as exc:
            if isinstance(exc.cause, ConfigError):
                self._is_mirrored = False
            logger.warning("the training state is not copied to another host: %s", _first_line(_cause(exc)))
        except WorkerGroupError:
            pass  # it was not kept
        except Exception as exc:  # noqa: BLE001 - hosts are gone, or slow; training ends for other reasons
            logger.warning("the training state is not copied to another host: %s", _first_line(exc))

    def _arenas(self, step: int) -> tuple[int, list[str]]:
        """The step that every rank can get, at most `step`, and where on its host each finds it."""
        nodes = {process.node_id for process in self._ranks().processes.values()}
        is_where_it_was = {keeper.node for keeper in self._keepers} == nodes and all(
            self._ranks().processes[rank].node_id == keeper.node for keeper in self._keepers for rank in keeper.ranks
        )
        if is_where_it_was:
            try:
                return step, _by_rank(self._asked("arenas_of", step))
            except (CheckpointEngineError, RayError):
                if len(self._keepers) == 1:
                    raise
        step = self._gather(step)
        return step, _by_rank(self._asked("arenas_of", step))

    def _gather(self, step: int) -> int:
        """Bring what is left on other hosts to those where the ranks are now. Raises what a keeper raises."""
        step, holders = self._found(step)
        before, keepers = self._keepers, self._started()
        try:
            for keeper in keepers:
                for holder in holders:
                    if here := [rank for rank in holder.ranks if rank in keeper.ranks]:
                        lent = holder.lend(step, here, to=[keeper.address], with_plans=True)
                        _answer(keeper.actor.fetch.remote(step, lent, own=True), MIRRORS_WITHIN_S)
        except BaseException:
            _end(keepers)
            raise
        self._keepers, self._is_mirrored, self._step = keepers, None, step
        _end(before)
        logger.info("the training state after step %d was brought to the hosts where the ranks are now", step)
        return step

    def _reshard(self, step: int) -> int:
        """Have ranks that are more or fewer than before take their parts. Raises what keepers and ranks raise."""
        if any(one.places is None for one in self._described):
            raise TransportError("the training engine has no `places`, which tell what another number of ranks takes")
        step, holders = self._found(step)
        processes = self._ranks().processes
        hosts = [processes[rank].address for rank in sorted(processes)]
        left: dict[int, Left] = {}
        for holder in holders:
            lent: Lent = _answer(holder.lend(step, holder.ranks, to=hosts), KEEPS_WITHIN_S)
            left |= {
                rank: Left(lent.wire, address, lent.digests[rank], self._described[rank])
                for rank, (address, _) in lent.places.items()
            }
        each = [[left[rank] for rank in sorted(left)]] * len(hosts)
        self._ranks().check_resharded(each, hosts)  # before any of them changes anything
        self._ranks().restore_resharded(each, hosts, [step] * len(hosts))
        logger.info("%d ranks have taken what %d left in memory after step %d", len(hosts), len(left), step)
        return step

    def _found(self, step: int) -> tuple[int, list[_Holder]]:
        """The last step, at most `step`, that every rank's state is left of, and by whom. Raises TransportError."""
        held = _held_by(self._keepers)
        for one in (step, step - 1):
            missing = set(range(len(self._described)))
            holders = []
            for actor, copies, steps in held:
                if here := sorted(rank for rank in missing if one in steps.get(rank, ())):
                    holders.append(_Holder(actor, copies, tuple(here)))
                    missing -= set(here)
            if not missing:
                return one, holders
        raise TransportError("it is not whole on the hosts that are left")

    def _settle(self) -> None:
        """Wait until what is being kept is there, or is known not to be; what was kept before is there then."""
        self._end_mirroring()
        copying, self._copying = self._copying, None
        if copying is None:
            return
        try:
            copying.result()
        except WorkerGroupError:
            pass  # the next call of the ranks raises it, too
        except Exception as exc:  # noqa: BLE001 - whatever a rank or a keeper raises; training ends for other reasons
            logger.warning("the training state of a step is not kept in memory: %s", _first_line(exc))

    def _give_up(self, exc: Exception) -> None:
        """Another keeper is started when the next step is kept."""
        logger.warning("the training state in memory is lost: %s", _first_line(exc))
        self.close()

    def _asked(self, method: str, step: int) -> dict[int, str]:
        """What all keepers answer, by rank. Raises what a keeper raised."""
        asked = [getattr(keeper.actor, method).remote(step) for keeper in self._keepers]
        answers: list[Mapping[int, str]] = _answer(asked, KEEPS_WITHIN_S)
        return {rank: path for answer in answers for rank, path in answer.items()}


def _answer(asked: Any, timeout_s: float) -> Any:
    """Raises what a keeper raised."""
    try:
        return ray.get(asked, timeout=timeout_s)
    except RayTaskError as exc:
        raise _cause(exc) from None


def _cause(exc: RayTaskError) -> Exception:
    return exc.cause if isinstance(exc.cause, CheckpointEngineError) else exc


def _held_by(keepers: Sequence[_Keeper]) -> list[tuple[Any, bool, dict[int, list[int]]]]:
    """Who has what: a keeper's actor, whether these are copies, and the steps by rank. Owners first."""
    own, copies = [], []
    for keeper in keepers:
        try:
            steps = ray.get(keeper.actor.steps.remote(), timeout=KEEPS_WITHIN_S)
        except RayError:
            continue  # it went with its host
        own.append((keeper.actor, False, steps[0]))
        copies.append((keeper.actor, True, steps[1]))
    return own + copies


def _end(keepers: Sequence[_Keeper]) -> None:
    if keepers:
        freed = [keeper.actor.close.remote() for keeper in keepers]
        ray.wait(freed, num_returns=len(freed), timeout=FREES_WITHIN_S)
    for keeper in keepers:
        ray.kill(keeper.actor)


async def until_kept(kept: Future[None], version: int) -> None:
    """Return when the state that makes `version` is kept, or when it cannot be, though the ranks are there.

    Raises TransportError if they died before, and if they take too long, as one that is stopped does.
    """
    try:
        async with asyncio.timeout(KEEPS_WITHIN_S):
            await asyncio.shield(asyncio.wrap_future(kept))
    except TimeoutError as exc:
        raise TransportTimeout(
            f"the trainer ranks have not left their state in memory within {KEEPS_WITHIN_S:g} s", version=version
        ) from exc
    except WorkerGroupError as exc:
        raise TransportError("the trainer ranks died before their state was in memory", version=version) from exc
    except Exception:
        logger.debug("version %d has no state in memory", version, exc_info=True)


def _by_rank(paths: Mapping[int, str]) -> list[str]:
    return [paths[rank] for rank in sorted(paths)]


def _told(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _first_line(exc: Exception) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0]
