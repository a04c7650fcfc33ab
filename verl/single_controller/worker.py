"""`Worker`, the base of classes with one instance per rank, and the Ray actor around it."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle

from verl.checkpoint_engine.support.network import host_addresses, interface_of, reserve_port
from verl.single_controller.errors import WorkerFailed
from verl.utils.lifetime import begin_actor

_node_address: Callable[[], str] = ray.util.get_node_ip_address
_dumps: Callable[[object], bytes] = cloudpickle.dumps


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """A worker's rank and place in its group. The defaults describe a worker without a group: a world of one."""

    group: str = "local"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    host_addresses: tuple[str, ...] = ()
    """The addresses of all hosts of the group, if there are several."""

    def environment(self) -> dict[str, str]:
        """The environment variables of `torch.distributed` and launchers for this rank."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of a rank: its id, the address of its node, Ray's id of that node."""

    pid: int
    address: str
    node_id: str


class Worker:
    """Base of per-rank classes. `rank_info` is set before `__init__` runs, which may take any arguments.

    Under a `RayWorkerGroup`, `__init__` and every plain method run on one and the same thread of the rank's process,
    one after the other, in the order of the driver's calls: collectives and the thread's current device are safe there.
    `async def` methods run on the actor's event loop meanwhile and must not block it.
    """

    rank_info: RankInfo = RankInfo()
    _verl_thread: ThreadPoolExecutor | None = None

    @property
    def rank(self) -> int:
        return self.rank_info.rank

    @property
    def world_size(self) -> int:
        return self.rank_info.world_size

    @property
    def local_rank(self) -> int:
        """Index among the ranks that share this rank's node in the resource pool."""
        return self.rank_info.local_rank

    @property
    def local_world_size(self) -> int:
        return self.rank_info.local_world_size

    @property
    def master_addr(self) -> str:
        """Address of rank 0's node, for the rendezvous of the group."""
        return self.rank_info.master_addr

    @property
    def master_port(self) -> int:
        """A port on rank 0's node that is reserved for rank 0."""
        return self.rank_info.master_port

    async def on_rank_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """For `async def` methods: run `function` on the thread of the plain methods, after those already called.

        Collectives of the group, and all use of plain methods' state, must run there. Waiting here for a plain method
        that itself waits for the caller is a deadlock.
        """
        return await asyncio.get_running_loop().run_in_executor(self._verl_thread, function, *args)

    def close(self) -> None:
        """Release resources that outlive a killed process (shared memory, files). `RayWorkerGroup.shutdown` calls it on
        the rank's thread, unless the group has failed; the process is always killed afterwards."""


class RankHost:
    """The actor methods that `actor_class` adds to a worker class. Called by `RayWorkerGroup` only.

    Ray would run plain methods on the event loop, where a long one blocks all control calls, and in the order in which
    their arguments arrive. The next call may overtake one with a large argument on some ranks only; two ranks then wait
    in different collectives for ever. Hence a thread and numbered turns.
    """

    def __init__(self) -> None:
        begin_actor()
        self._verl_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank")
        self._verl_next_turn = 0
        self._verl_turn_taken = asyncio.Condition()

    async def _verl_free_address(self) -> tuple[str, int]:
        """Address of this node and a port that is kept for this process."""
        self._verl_reserved = reserve_port()
        return _node_address(), self._verl_reserved.getsockname()[1]

    async def _verl_host_addresses(self) -> tuple[str, ...]:
        return host_addresses()

    async def _verl_ping(self) -> None:
        """Answers as long as the process lives."""

    async def _verl_start(self, info: RankInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankProcess:
        """Run the worker's own `__init__`."""
        self.rank_info = info
        os.environ.update(info.environment())
        if info.world_size > info.local_world_size:
            # By itself gloo looks up the host's name, which often stands for an address that only this host knows.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(_node_address()))

        def construct() -> None:
            with self._verl_reporting("__init__"):
                super(RankHost, self).__init__(*args, **kwargs)

        await asyncio.get_running_loop().run_in_executor(self._verl_thread, construct)
        return RankProcess(os.getpid(), _node_address(), ray.get_runtime_context().get_node_id())

    async def _verl_call(self, turn: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a plain method on the rank's thread, as the `turn`-th call."""

        def run() -> Any:
            with self._verl_reporting(method):
                return getattr(self, method)(*args, **kwargs)

        async with self._verl_turn_taken:
            await self._verl_turn_taken.wait_for(lambda: self._verl_next_turn == turn)
            outcome = asyncio.get_running_loop().run_in_executor(self._verl_thread, run)
            self._verl_next_turn += 1
            self._verl_turn_taken.notify_all()
        return await outcome

    async def _verl_call_async(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run an `async def` method on the event loop, at once."""
        with self._verl_reporting(method):
            return await getattr(self, method)(*args, **kwargs)

    @contextmanager
    def _verl_reporting(self, method: str) -> Iterator[None]:
        """Turn whatever is raised, `SystemExit` included, into a `WorkerFailed` that can travel."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - nothing a worker raises may be lost on the way
            info = self.rank_info
            where = f"rank {info.rank} (pid {os.getpid()} on {_node_address()})"
            raise WorkerFailed(
                f"worker group {info.group!r}: {method} raised {type(error).__name__} on {where}: {error}",
                group=info.group,
                rank=info.rank,
                traceback="".join(traceback.format_exception(error)),
                pickled=_pickle(error),
            ) from None


def _pickle(error: BaseException) -> bytes | None:
    """None where the exception does not survive the journey; its text travels anyway."""
    if not isinstance(error, Exception):
        return None
    try:
        pickled = _dumps(error)
        cloudpickle.loads(pickled)
    except Exception:  # noqa: BLE001 - foreign classes fail to pickle in any way they like
        return None
    return pickled


def actor_class(cls: type[Worker]) -> type:
    """The class that Ray instantiates for `cls`: its constructor only readies the process, `_verl_start` does the rest.

    So all processes start at the same time, rank 0 reports its address before any `__init__`, and an error in
    `__init__` is that of a normal call.
    """
    return type(cls.__name__, (RankHost, cls), {"__doc__": cls.__doc__})
