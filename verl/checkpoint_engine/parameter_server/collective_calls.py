"""Collective calls of several ranks: they meet, get a process group, learn of each other's failures, and part."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..compat.torch import HashStore, PrefixStore, Store, TCPStore
from ..errors import CheckpointEngineError
from ..links.communicators import GroupMaker
from ..links.network import LOOPBACK, own_address
from ..links.rendezvous import Deadline
from ..support.admission import ANY_HOST, OWN_USER, Doorkeeper
from .groups import Group, communicator_for, is_inside, meeting_place, open_store
from .progress import FirstFailure
from .roster import Roster

CLOSING_S = 2.0


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    roster: Roster
    group: Group | None
    """None with a single rank."""
    failure: FirstFailure
    """The first failure on this or another rank."""
    deadline: Deadline
    own_deadline: Deadline
    """The deadline of waits for this rank's engine or a peer's memory. It is earlier than that of waits for other
    ranks, so that the first error is that of the rank that knows the cause."""


class CollectiveCalls:
    """One rank's store and process groups for its collective calls, one at a time. It connects on first use."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        master: str | None,
        keep_groups: bool,
        timeout_s: float,
    ) -> None:
        """`keep_groups`: keep the group of each set of ranks until something of theirs fails."""
        self._rank, self._world_size = rank, world_size
        self._device = device
        self._master = master
        self._keep_groups = keep_groups
        self._timeout_s = timeout_s
        self._store: Store | None = None
        self._communicator: GroupMaker | None = None
        self._doors: Doorkeeper | None = None
        self._groups: dict[tuple[int, ...], Group] = {}
        self._failed = False

    @contextmanager
    def begin(
        self, ranks: tuple[int, ...], *, keep: bool = False, timeout_s: float | None = None
    ) -> Iterator[CollectiveCall]:
        """The block of a collective call of `ranks`. An error on one rank ends it on all ranks, with the first error.

        `keep`: keep the group in any case. `timeout_s`: for this call; by default that of the constructor.
        """
        if self._failed:  # its error may have been in a cycle, and with it the memory for buckets
            gc.collect()
            self._failed = False
        whole_s = timeout_s or self._timeout_s
        deadline, failure = Deadline(whole_s), FirstFailure()
        own_deadline = Deadline(whole_s - min(CLOSING_S, whole_s / 8))
        roster = Roster(self._meeting_place(), self._rank, ranks, on_failure=failure.set)
        try:
            roster.meet(deadline)
            group = self._group(roster, ranks, deadline, failure)
            yield CollectiveCall(
                roster=roster, group=group, failure=failure, deadline=deadline, own_deadline=own_deadline
            )
            failure.check()
            roster.part()
        except BaseException as exc:  # noqa: BLE001 - raised again, or as the error that was first
            self._failed = True
            self._drop(ranks)
            failure.set(exc)
            first = failure.error
            assert first is not None
            error = roster.fail(first, origin=not (_is_echo(first) or roster.has_told(first)))
            release_frames(exc, first)
            try:
                if error is exc or not isinstance(exc, Exception):
                    raise
                raise error from exc
            finally:
                del first, error  # their tracebacks lead back here
        finally:
            roster.leave()
            failure.forget()
            roster.forget()
            if not (self._keep_groups or keep):
                self._drop(ranks)

    def init_default_group(self, timeout_s: float | None) -> None:
        """Make torch's default process group, over the ranks' store. All ranks call it."""
        dist.init_process_group(
            store=PrefixStore("default_group", self._meeting_place()),
            rank=self._rank,
            world_size=self._world_size,
            timeout=timedelta(seconds=timeout_s or self._timeout_s),
        )

    def close(self) -> None:
        for ranks in list(self._groups):
            self._drop(ranks)
        self._communicator = None
        self._store = None
        if self._doors is not None:
            self._doors.close()
            self._doors = None

    def _meeting_place(self) -> Store:
        if self._store is None:
            alone = self._world_size == 1
            self._store = HashStore() if alone else self._open_store()
        return self._store

    def _open_store(self) -> Store:
        host, _ = meeting_place(self._master)
        self._doors = Doorkeeper(OWN_USER if is_inside(host) else ANY_HOST)
        return open_store(self._rank, self._master, self._timeout_s, self._doors)

    def _new_communicator(self) -> GroupMaker:
        made = communicator_for(self._device.type)
        if self._doors is not None:
            host, _ = meeting_place(self._master)
            made.listen_at(LOOPBACK if is_inside(host) else own_address(None), self._doors)
        return made

    def _group(self, roster: Roster, ranks: tuple[int, ...], deadline: Deadline, failure: FirstFailure) -> Group | None:
        """The group that all ranks have kept, else a new one."""
        if len(ranks) == 1:
            return None
        kept = self._groups.get(ranks)
        sessions = roster.exchange("process group", kept.session if kept else "", deadline)
        if kept and set(sessions.values()) == {kept.session}:
            return kept
        self._drop(ranks)
        if self._communicator is None:
            self._communicator = self._new_communicator()
        store = self._meeting_place()
        assert isinstance(store, TCPStore)  # there are several ranks
        self._groups[ranks] = Group.connect(
            self._communicator,
            store,
            rank=self._rank,
            ranks=ranks,
            session=roster.session,
            device=self._device,
            deadline=deadline,
            check=failure.check,
        )
        return self._groups[ranks]

    def _drop(self, ranks: tuple[int, ...]) -> None:
        group = self._groups.pop(ranks, None)
        if group is not None:
            group.close()


def release_frames(*errors: BaseException | None) -> None:
    """Clear the frames of `errors` and their causes, which would keep buckets mapped and groups open."""
    pending, seen = list(errors), set()
    while pending:
        error = pending.pop()
        if error is not None and id(error) not in seen:  # raised on several threads, they may lead back to each other
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            pending += [error.__cause__, error.__context__]


def _is_echo(error: CheckpointEngineError) -> bool:
    """Whether a connection broke, which tells that something is wrong somewhere, but not what."""
    return isinstance(error.__cause__, RuntimeError)
