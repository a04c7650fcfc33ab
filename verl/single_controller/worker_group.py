"""`RayWorkerGroup`: one Ray actor per rank, called from the driver as if it were one object."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from verl.protocol import DataProto
from verl.single_controller.colocated import ColocatedWorkers
from verl.single_controller.dispatch import Call, Dispatch, plan, registrations
from verl.single_controller.errors import WorkerDied, WorkerFailed, WorkerGroupClosed, WorkerTimeout
from verl.single_controller.future import Ref, WorkerFuture, is_of_dead_actor
from verl.single_controller.init_args import RayClassWithInitArgs
from verl.single_controller.resource_pool import RayResourcePool
from verl.single_controller.worker import RankInfo, RankProcess, Worker, actor_class

logger = logging.getLogger(__name__)

MAX_CONCURRENT_CALLS = 1000
"""Calls that one worker accepts at a time: async methods in flight and plain methods waiting for their turn."""
LIVENESS_TIMEOUT_S = 2.0
"""After one rank has raised, the other ranks have this time to answer that they live."""
STRAGGLER_TIMEOUT_S = 5.0
"""The next call waits this long for ranks that are still busy with a call that failed on another rank."""
KILL_TIMEOUT_S = 10.0
SILENCE_S = 600.0
"""Long, because a rank may not answer while it writes a large tensor to a slow disk."""


class RayWorkerGroup:
    """Starts a worker per rank of `resource_pool`; every `@register`ed method is a method of the group.

        with RayWorkerGroup(resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(cls=Actor, config=c)) as actors:
            actors.init_model()
            log_probs = actors.compute_log_prob(batch)           # spread and collected as registered
            future = actors.submit("update_actor", batch)        # the same without waiting
            metrics = await future                               # or future.get(timeout=60)

    Used on the driver; threads may share it. After a method has raised, the group is usable as soon as its other ranks
    are done with that call. The death of a worker ends the whole group.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs,
        *,
        name_prefix: str | None = "",
        env_vars: Mapping[str, str] | None = None,
        nsight: Mapping[str, str] | None = None,
        startup_timeout_s: float = 120.0,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`env_vars` are set before the processes import anything. With `nsight`, options of `nsys profile`, that runs
        each process.

        `startup_timeout_s` limits the start of all processes with their `__init__`; placement has the pool's deadline.
        A rank in a call that does not answer a check within `silence_s` fails the call. Raises PlacementError,
        WorkerTimeout, WorkerDied or an error of `__init__`, after ending all processes.
        """
        self._cls = ray_cls_with_init.cls
        self.name = name_prefix or self._cls.__name__
        self._registrations = registrations(self._cls)
        taken = sorted(name for name in self._registrations if hasattr(type(self), name))
        if taken:
            raise TypeError(f"{self._cls.__name__} registers {taken}, which are names of RayWorkerGroup itself")
        self._pool = resource_pool
        self._lock = threading.Lock()
        self._workers: list[Any] = []
        self._processes: dict[int, RankProcess] = {}
        self._turns: list[int] = [0] * resource_pool.world_size
        self._stragglers: dict[Ref, str] = {}
        self._closed = False
        self._death: BaseException | None = None
        self._silence_s = silence_s
        self._lost: list[str] = []
        """Of whom `_death` tells."""
        try:
            runtime = {"env_vars": dict(env_vars or {})} | ({"nsight": dict(nsight)} if nsight else {})
            self._start(ray_cls_with_init, runtime, startup_timeout_s)
        except BaseException:
            self._destroy()
            raise

    @property
    def world_size(self) -> int:
        return self._pool.world_size

    @property
    def workers(self) -> list[ActorHandle[Any]]:
        """The ranks' actors. Their `async def` methods may be called directly; plain ones only through the group."""
        return list(self._workers)

    @property
    def processes(self) -> dict[int, RankProcess]:
        """Process and node of each rank."""
        return dict(self._processes)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> WorkerFuture:
        """Call a registered method on the ranks without waiting, whatever its `blocking`."""
        registration = self._registrations[method]
        calls = plan(
            registration.dispatch_mode, args, kwargs, world_size=self.world_size, label=f"{self.name}.{method}"
        )
        return self._send(method, calls.calls, calls.collect)

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> WorkerFuture:
        """Call any method with the same arguments on every rank; the result is a list with one entry per rank."""
        calls = plan(Dispatch.ONE_TO_ALL, args, kwargs, world_size=self.world_size, label=f"{self.name}.{method}")
        return self._send(method, calls.calls, calls.collect)

    def execute_all_sync(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        results: list[Any] = self.execute_all_async(method, *args, **kwargs).get()
        return results

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> WorkerFuture:
        """Call any method on rank 0 alone."""
        calls = plan(Dispatch.RANK_ZERO, args, kwargs, world_size=self.world_size, label=f"{self.name}.{method}")
        return self._send(method, calls.calls, calls.collect)

    def execute_rank_zero_sync(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.execute_rank_zero_async(method, *args, **kwargs).get()

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RoleGroup]:
        """A view of the group for each of these roles of `create_colocated_worker_cls`. Starts no process."""
        known = self._cls.roles if issubclass(self._cls, ColocatedWorkers) else {}
        groups = {role: RoleGroup(self, role) for role in prefix_set}
        if unknown := [role for role in groups if role not in known]:
            raise ValueError(
                f"worker group {self.name!r} has no role {unknown[0]!r}; known: {', '.join(known) or 'none'}"
            )
        return groups

    def lost(self, timeout_s: float) -> list[str]:
        """A text on each rank that died or does not answer within `timeout_s`; ranks answer while they compute.

        A group that has failed has always lost a rank.
        """
        if self._closed:
            return list(self._lost)
        asked: dict[Ref, int] = {worker._verl_ping.remote(): rank for rank, worker in enumerate(self._workers)}
        answers, silent = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
        dead = sorted(asked[ref] for ref in answers if is_of_dead_actor(ref))
        return [f"{self._where(rank)} died" for rank in dead] + [
            f"{self._where(asked[ref])} does not answer" for ref in silent
        ]

    def shutdown(self, grace_s: float = 5.0) -> None:
        """Have the workers `close()` within `grace_s` seconds, end their processes, and release the pool.

        Idempotent. Leaving the group's `with` block calls it.
        """
        if not self._closed and grace_s > 0 and self._cls.close is not Worker.close and not self._busy(0):
            try:
                self.execute_all_async("close").get(timeout=grace_s)
            except Exception:
                logger.warning("worker group %r: close failed; the processes are killed", self.name, exc_info=True)
        self._destroy()

    def __enter__(self) -> RayWorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(grace_s=5.0 if error is None else 1.0)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The registered methods. Only called for names that are not attributes."""
        known = self.__dict__.get("_registrations", {})
        if name not in known:
            if name in dir(self.__dict__.get("_cls")) and not name.startswith("_"):
                raise AttributeError(f"{self._cls.__name__}.{name} is not marked with @register")
            close = difflib.get_close_matches(name, known, n=1)
            raise AttributeError(f"worker group has no method {name!r}" + (f"; meant {close[0]!r}?" if close else ""))
        return functools.partial(self._call, name)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        future = self.submit(method, *args, **kwargs)
        return future.get() if self._registrations[method].blocking else future

    def _start(self, spec: RayClassWithInitArgs, runtime: dict[str, Any], timeout_s: float) -> None:
        slots = self._pool.acquire(self)
        deadline = time.monotonic() + timeout_s
        remote: Any = ray.remote(actor_class(spec.cls))
        unique = uuid.uuid4().hex[:8]  # Ray wants unique names; two groups may have the same
        self._workers = [
            remote.options(
                name=f"{self.name}-{slot.rank}-{unique}",
                max_concurrency=MAX_CONCURRENT_CALLS,
                **({"runtime_env": runtime} if any(runtime.values()) else {}),
                **slot.options,
            ).remote()
            for slot in slots
        ]
        asked = {self._workers[0]._verl_free_address.remote(): 0}
        first = self._future("start", asked, lambda results: results[0], silence_s=math.inf)
        master_addr, master_port = first.get(timeout_s)
        addresses = self._host_addresses(timeout_s) if any(slot.local_world_size < len(slots) for slot in slots) else ()
        infos = [
            RankInfo(
                group=self.name,
                rank=slot.rank,
                world_size=self.world_size,
                local_rank=slot.local_rank,
                local_world_size=slot.local_world_size,
                master_addr=master_addr,
                master_port=master_port,
                host_addresses=addresses,
            )
            for slot in slots
        ]
        refs = {
            worker._verl_start.remote(info, spec.args, spec.kwargs): info.rank
            for worker, info in zip(self._workers, infos, strict=True)
        }
        processes = self._future("__init__", refs, list, silence_s=math.inf).get(max(0.0, deadline - time.monotonic()))
        self._processes = dict(enumerate(processes))

    def _host_addresses(self, timeout_s: float) -> tuple[str, ...]:
        """Of every host that has ranks."""
        refs = {worker._verl_host_addresses.remote(): rank for rank, worker in enumerate(self._workers)}
        found: list[tuple[str, ...]] = self._future("start", refs, list, silence_s=math.inf).get(timeout_s)
        return tuple(sorted({address for addresses in found for address in addresses}))

    def _send(self, method: str, calls: Mapping[int, Call], collect: Callable[[list[Any]], Any]) -> WorkerFuture:
        if self._closed:
            raise WorkerGroupClosed(
                f"worker group {self.name!r} is closed: no {method}", group=self.name
            ) from self._death
        is_async = inspect.iscoroutinefunction(getattr(self._cls, method))
        task = f"{self.name}.{method}"
        shared: dict[int, Any] = {}
        refs: dict[Ref, int] = {}
        with self._lock:  # every rank gets the calls of all threads in the same order
            if not is_async:
                self._check_idle(method)
            for rank, (args, kwargs) in calls.items():
                worker = self._workers[rank]
                args = tuple(_share(value, shared, len(calls)) for value in args)
                kwargs = {key: _share(value, shared, len(calls)) for key, value in kwargs.items()}
                if is_async:
                    refs[worker._verl_call_async.options(name=task).remote(method, *args, **kwargs)] = rank
                else:
                    refs[worker._verl_call.options(name=task).remote(self._turns[rank], method, *args, **kwargs)] = rank
                    self._turns[rank] += 1
        return self._future(method, refs, collect)

    def _future(
        self,
        method: str,
        refs: Mapping[Ref, int],
        collect: Callable[[list[Any]], Any],
        *,
        silence_s: float | None = None,
    ) -> WorkerFuture:
        """`silence_s` is infinite for processes that start: they answer nobody yet, and have their own deadline."""
        return WorkerFuture(
            refs,
            group=self.name,
            method=method,
            collect=collect,
            on_failure=self._on_failure,
            on_silence=self._on_silence,
            silence_s=self._silence_s if silence_s is None else silence_s,
        )

    def _on_failure(self, method: str, rank: int, error: BaseException, unfinished: Mapping[Ref, int]) -> BaseException:
        """See `FailureHandler`. A rank's exception may only be the echo of another's death (a broken connection)."""
        if self._closed:
            closed = WorkerGroupClosed(f"worker group {self.name!r} was shut down during {method}", group=self.name)
            return self._death or closed
        cause = error.cause if isinstance(error, RayTaskError) else None
        if isinstance(cause, WorkerFailed):
            dead, silent = self._ask_others(rank)
            if dead is None:
                self._stragglers |= {ref: f"rank {other} in {method}" for ref, other in unfinished.items()}
                original = _original(cause)
                for other in silent:
                    original.add_note(f"{self._where(other)} does not answer: stopped, or out of reach?")
                return original
            rank, error = dead
        if isinstance(error, RayActorError):
            process = self._processes.get(rank)
            pid, node = (process.pid, process.address) if process else (None, None)
            self._lost = [f"{self._where(rank)} died during {method}"]
            self._death = WorkerDied(
                f"worker group {self.name!r}: {self._where(rank)} died during {method}; its other ranks have been "
                f"killed: {_exit(error)}",
                group=self.name,
                rank=rank,
                pid=pid,
                node=node,
            )
            self._death.__cause__ = cause
        else:  # an argument or a result was lost on the way; the ranks are out of step now
            message = (
                f"worker group {self.name!r}: {method} was lost on rank {rank}; all ranks have been killed.\n{error}"
            )
            self._lost = [f"{method} was lost on {self._where(rank)}"]
            self._death = WorkerFailed(message, group=self.name, rank=rank)
        self._destroy(wait=False)
        return self._death

    def _on_silence(self, method: str, unfinished: Mapping[Ref, int]) -> BaseException | None:
        """See `SilenceHandler`. Ranks answer while they compute; what one that died owes fails by itself."""
        asked: dict[Ref, int] = {self._workers[rank]._verl_ping.remote(): rank for rank in unfinished.values()}
        deadline = time.monotonic() + self._silence_s
        while ready := ray.wait([*asked, *unfinished], timeout=max(0.0, deadline - time.monotonic()))[0]:
            asked = {ping: rank for ping, rank in asked.items() if ping not in ready}
            if not asked or ready[0] in unfinished:
                return None
        rank = next(iter(asked.values()))
        return WorkerTimeout(
            f"worker group {self.name!r}: {self._where(rank)} does not answer, and is not done with {method}",
            group=self.name,
            rank=rank,
        )

    def _where(self, rank: int) -> str:
        process = self._processes.get(rank)
        return f"rank {rank}" + (f" (pid {process.pid} on {process.address})" if process else "")

    def _ask_others(self, asking: int) -> tuple[tuple[int, BaseException] | None, list[int]]:
        """A rank that is dead, with Ray's word for it, and those that do not answer. Ranks do while they compute."""
        others: dict[Ref, int] = {
            worker._verl_ping.remote(): rank for rank, worker in enumerate(self._workers) if rank != asking
        }
        if not others:
            return None, []
        answers, silent = ray.wait(list(others), num_returns=len(others), timeout=LIVENESS_TIMEOUT_S)
        for ref in answers:
            try:
                ray.get(ref)
            except RayActorError as error:
                return (others[ref], error), []
        return None, [others[ref] for ref in silent]

    def _busy(self, timeout_s: float) -> list[str]:
        """What is still running of calls that failed, after at most `timeout_s`."""
        if self._stragglers:
            refs = list(self._stragglers)
            _, unfinished = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
            self._stragglers = {ref: self._stragglers[ref] for ref in unfinished}
        return list(self._stragglers.values())

    def _check_idle(self, method: str) -> None:
        busy = self._busy(STRAGGLER_TIMEOUT_S)
        if busy:
            raise WorkerGroupClosed(
                f"worker group {self.name!r} cannot run {method}: still busy with a call that failed elsewhere: "
                f"{', '.join(busy)}",
                group=self.name,
            )

    def _destroy(self, *, wait: bool = True) -> None:
        self._closed = True
        if not ray.is_initialized():
            return
        for worker in self._workers:
            ray.kill(worker)
        if wait and self._workers:
            gone = [worker._verl_ping.remote() for worker in self._workers]
            ray.wait(gone, num_returns=len(gone), timeout=KILL_TIMEOUT_S)
        self._pool.release(self)


def _share(value: Any, shared: dict[int, Any], num_ranks: int) -> Any:
    """A batch that goes to several ranks is put into the object store once."""
    if not isinstance(value, DataProto) or num_ranks == 1:
        return value
    if id(value) not in shared:
        shared[id(value)] = ray.put(value)
    return shared[id(value)]


def _exit(error: RayActorError) -> str:
    """What Ray knows of the end of the process, without the numbers by which Ray names it."""
    return " ".join(str(error).split("The actor is dead because ", 1)[-1].split())


def _original(failed: WorkerFailed) -> BaseException:
    """The exception that the worker raised, caused by `failed`; or `failed` itself where it cannot be had."""
    if failed.pickled is None:
        return failed
    try:
        original: Exception = cloudpickle.loads(failed.pickled)
    except Exception:  # noqa: BLE001 - its class may exist on the worker only; the text says it all
        return failed
    original.__cause__ = failed
    original.add_note(failed.args[0])
    return original


class RoleGroup:
    """The ranks of `group` in one of their roles: `actors.update(batch)` is `group.actor_update(batch)`.

    Made by `RayWorkerGroup.spawn`, and ended with that group.
    """

    def __init__(self, group: RayWorkerGroup, role: str) -> None:
        self._group, self._prefix = group, f"{role}_"

    @property
    def world_size(self) -> int:
        return self._group.world_size

    def submit(self, method: str, *args: Any, **kwargs: Any) -> WorkerFuture:
        return self._group.submit(self._prefix + method, *args, **kwargs)

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> WorkerFuture:
        return self._group.execute_all_async(self._prefix + method, *args, **kwargs)

    def execute_all_sync(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._group.execute_all_sync(self._prefix + method, *args, **kwargs)

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> WorkerFuture:
        return self._group.execute_rank_zero_async(self._prefix + method, *args, **kwargs)

    def execute_rank_zero_sync(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._group.execute_rank_zero_sync(self._prefix + method, *args, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The registered methods. Only called for names that are not attributes."""
        if name.startswith("__"):
            raise AttributeError(name)
        method: Callable[..., Any] = getattr(self._group, self._prefix + name)
        return method
