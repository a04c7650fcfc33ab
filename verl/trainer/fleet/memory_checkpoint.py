"""Keeps the trainer's state after its last step in memory that outlives its ranks: `trainer.memory_checkpoint`.

ranks       copy their state into the spare slots of their host's keeper, while they train, and send its digests
keepers     commit once every rank of the run has copied: the state is whole, or that of the step before
keepers     add up parity of the states of other hosts: a group may lose one host
new ranks   compare digests, and load the state; on another host the keeper reads it from the rest of the group
fewer ranks read their parts from the keepers that have them, compare digests, and load them
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.checkpoint_engine.errors import CheckpointEngineError, ConfigError, TransportError, TransportTimeout
from verl.checkpoint_engine.support import envs
from verl.checkpoint_engine.support.loop_thread import LoopThread
from verl.checkpoint_engine.support.memory import in_words
from verl.single_controller import RayWorkerGroup
from verl.single_controller.errors import WorkerGroupError
from verl.single_controller.future import WorkerFuture
from verl.trainer.fleet.state_keepers import (
    KEEPS_WITHIN_S,
    Found,
    Keeper,
    answer,
    cause,
    end,
    find,
    groups_of,
    held_by,
)
from verl.workers.memory_checkpoint.keeper import StateKeeper
from verl.workers.memory_checkpoint.lent import Lent
from verl.workers.memory_checkpoint.resharded import Left, StateDescription

logger = logging.getLogger(__name__)

PROTECTS_WITHIN_S = 300.0
"""Parity that takes longer is given up, because the next step waits for it. The same limit holds for rebuilding."""


class MemoryCheckpoint:
    """Has the keepers keep and restore states. Lives on the driver, used by its main thread."""

    def __init__(self, ranks: Callable[[], RayWorkerGroup], loop: LoopThread, *, enabled: bool) -> None:
        """`ranks` returns the current trainer ranks."""
        self._ranks, self._loop, self._enabled = ranks, loop, enabled
        self._keepers: list[Keeper] = []
        self._described: list[StateDescription] = []
        """By rank, of those that the keepers have memory for."""
        self._is_reserved = False
        self._copying: Future[None] | None = None
        self._digests: dict[int, list[bytes]] = {}
        """By step, of what each rank left: of the last two."""
        self._protecting: Future[None] | None = None
        self._is_protected: bool | None = None
        """None before it was tried."""
        self._step: int | None = None

    def start(self) -> None:
        """Start a keeper on each host with ranks, if there are none; does not wait for them."""
        if self._enabled and not self._keepers:
            self._keepers = self._started()

    def _started(self) -> list[Keeper]:
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
            Keeper(tuple(ranks), node, addresses[node], start(number, node))
            for number, (node, ranks) in enumerate(by_node.items())
        ]

    def keep(self, step: int) -> None:
        """Start copying the ranks' state after `step` to the keepers. The ranks may go on at once. The previous state
        is kept until the copy is complete."""
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
        if len(self._keepers) > 1 and self._is_protected is not False:
            self._protecting = self._loop.start(self._protect(step, self._keepers, self._copying))

    @property
    def copying(self) -> Future[None] | None:
        """Done when the keepers have the state; None if no copy is in progress."""
        return self._copying

    def end_copying(self) -> None:
        """After the death of the ranks: wait until the current copy has ended or failed."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.exception()
        self._end_protecting()

    def restore(self) -> int | None:
        """Have the new ranks load the last kept state; returns its step, None without a whole state.

        With ranks on other hosts it may be the step before the last one.
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
        elif len(self._keepers) > 1 and self._is_protected is None:  # these keepers have just got it
            self._protecting = self._loop.start(self._protect(step, self._keepers))
        return step

    def forget(self) -> None:
        """Drop the kept states after the run went back behind their step: later states with the same step number
        differ."""
        self._settle()
        self.close()

    def close(self) -> None:
        """End the keepers, and return when their memory is free. Idempotent."""
        keepers, self._keepers, self._step, self._is_reserved = self._keepers, [], None, False
        self._is_protected = None  # other keepers do not know the plans
        self._digests = {}
        end(keepers)

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
            f"{in_words(nbytes)} on {processes[keeper.ranks[0]].address}"
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
        self._digests = {known: of for known, of in self._digests.items() if known == self._step} | {step: digests}
        for reference in [
            keeper.actor.commit.remote(step, {rank: digests[rank] for rank in keeper.ranks}) for keeper in self._keepers
        ]:
            await reference
        self._step = step

    async def _protect(self, step: int, keepers: Sequence[Keeper], kept: Future[None] | None = None) -> None:
        """Once `step` is kept, have each keeper add up parity of what the others of its group have."""
        if kept is not None:
            await asyncio.shield(asyncio.wrap_future(kept))
        began_s = time.monotonic()
        with_plans, asked = self._is_protected is None, []
        for group in groups_of(len(keepers)):
            members = [keepers[number] for number in group]
            to = [keeper.address for keeper in members]
            lent = [keeper.actor.lend.remote(step, keeper.ranks, to=to, with_plans=with_plans) for keeper in members]
            asked += [keeper.actor.protect.remote(step, number, *lent) for number, keeper in enumerate(members)]
        async with asyncio.timeout(PROTECTS_WITHIN_S):
            sizes: list[int] = [await reference for reference in asked]
        if with_plans:
            logger.info(
                "the training state in memory survives the loss of a host, with %s of parity, computed in %.1f s",
                ", ".join(f"{in_words(size)} on {keeper.address}" for keeper, size in zip(keepers, sizes, strict=True)),
                time.monotonic() - began_s,
            )
        self._is_protected = True

    def _end_protecting(self) -> None:
        """Wait until no keeper reads from another one; a step without parity is on the hosts of its ranks alone."""
        protecting, self._protecting = self._protecting, None
        if protecting is None:
            return
        try:
            protecting.result()
        except RayTaskError as exc:
            if isinstance(exc.cause, ConfigError):
                self._is_protected = False
            logger.warning("the training state would not outlive the loss of a host: %s", _first_line(cause(exc)))
        except WorkerGroupError:
            pass  # it was not kept
        except Exception as exc:  # noqa: BLE001 - hosts are gone, or slow; training ends for other reasons
            logger.warning("the training state would not outlive the loss of a host: %s", _first_line(exc))

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
        before, found = self._keepers, self._find(step)
        keepers = self._started()
        try:
            lent = self._lent(found, [keeper.address for keeper in keepers])
            for keeper in keepers:
                for number in found.whole:
                    if here := [rank for rank in before[number].ranks if rank in keeper.ranks]:
                        answer(keeper.actor.fetch.remote(found.step, lent[number], here), PROTECTS_WITHIN_S)
                for number, group in found.lost.items():
                    if here := [rank for rank in before[number].ranks if rank in keeper.ranks]:
                        self._rebuild(keeper, found.step, number, group, here, lent, as_own=True)
        except BaseException:
            end(keepers)
            raise
        self._keepers, self._is_protected, self._step = keepers, None, found.step
        end(before)
        logger.info("the training state after step %d was copied to the hosts of the new ranks", found.step)
        return found.step

    def _reshard(self, step: int) -> int:
        """Have ranks that are more or fewer than before take their parts. Raises what keepers and ranks raise."""
        if any(one.places is None for one in self._described):
            raise TransportError("the training engine has no `places`, which another number of ranks needs")
        found, processes = self._find(step), self._ranks().processes
        hosts = [processes[rank].address for rank in sorted(processes)]
        lent = self._lent(found, hosts)
        parts = [lent[number] for number in found.whole]
        for number, group in found.lost.items():
            ranks = self._keepers[number].ranks
            helper = self._keepers[next(other for other in group if other != number)]
            self._rebuild(helper, found.step, number, group, ranks, lent, as_own=False)
            parts.append(answer(helper.actor.lend.remote(found.step, ranks, to=hosts, rebuilt=True)))
        left = {
            rank: Left(part.wire, address, part.digests[rank], self._described[rank])
            for part in parts
            for rank, (address, _) in part.places.items()
        }
        each = [[left[rank] for rank in sorted(left)]] * len(hosts)
        self._ranks().check_resharded(each, hosts)  # before any of them changes anything
        self._ranks().restore_resharded(each, hosts, [found.step] * len(hosts))
        logger.info(
            "%d ranks restored the state that %d stored in memory after step %d", len(hosts), len(left), found.step
        )
        return found.step

    def _find(self, step: int) -> Found:
        return find(step, [keeper.ranks for keeper in self._keepers], held_by(self._keepers))

    def _lent(self, found: Found, hosts: Sequence[str]) -> dict[int, Lent]:
        """What the keepers that have it let processes on `hosts`, and each other, read."""
        with_parity = {number for group in found.lost.values() for number in group}
        to = [*hosts, *(self._keepers[number].address for number in found.whole)]
        asked = {}
        for number in found.whole:
            keeper = self._keepers[number]
            asked[number] = keeper.actor.lend.remote(
                found.step, keeper.ranks, to=to, with_plans=True, with_parity=number in with_parity
            )
        return {number: answer(reference) for number, reference in asked.items()}

    def _rebuild(
        self,
        keeper: Keeper,
        step: int,
        lost: int,
        group: range,
        ranks: Collection[int],
        lent: Mapping[int, Lent],
        *,
        as_own: bool,
    ) -> None:
        """Have `keeper` make what `ranks` of the keeper `lost` left."""
        members = [{rank: self._described[rank].plan for rank in self._keepers[number].ranks} for number in group]
        digests = {rank: self._digests[step][rank] for rank in ranks}
        others = [lent[number] for number in group if number != lost]
        rebuilt = keeper.actor.rebuild.remote(step, members, group.index(lost), digests, *others, as_own=as_own)
        answer(rebuilt, PROTECTS_WITHIN_S)

    def _settle(self) -> None:
        """Wait until what is being kept is there, or is known not to be; what was kept before is there then."""
        self._end_protecting()
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
        answers: list[Mapping[int, str]] = answer(asked)
        return {rank: path for answer in answers for rank, path in answer.items()}


async def until_kept(kept: Future[None], version: int) -> None:
    """Wait until the state of `version` is kept, or cannot be kept although the ranks live.

    Raises TransportError if the ranks died before, and TransportTimeout if they take too long (a stopped rank).
    """
    try:
        async with asyncio.timeout(KEEPS_WITHIN_S):
            await asyncio.shield(asyncio.wrap_future(kept))
    except TimeoutError as exc:
        raise TransportTimeout(
            f"the trainer ranks did not store their state in memory within {KEEPS_WITHIN_S:g} s", version=version
        ) from exc
    except WorkerGroupError as exc:
        raise TransportError(
            "the trainer ranks died before they stored their state in memory", version=version
        ) from exc
    except Exception:
        logger.debug("version %d has no state in memory", version, exc_info=True)


def _by_rank(paths: Mapping[int, str]) -> list[str]:
    return [paths[rank] for rank in sorted(paths)]


def _first_line(exc: Exception) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0]
