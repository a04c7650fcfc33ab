"""Several worker classes in one process per rank: `create_colocated_worker_cls`, and the groups that `spawn` makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from verl.single_controller.dispatch import register, registrations
from verl.single_controller.init_args import RayClassWithInitArgs
from verl.single_controller.worker import Worker

if TYPE_CHECKING:
    from verl.single_controller.future import WorkerFuture
    from verl.single_controller.worker_group import RayWorkerGroup


class ColocatedWorkers(Worker):
    """One worker of every role. `create_colocated_worker_cls` makes subclasses that have the methods of all of them.

    They share the process, its thread for plain methods and its place among the ranks.
    """

    roles: ClassVar[Mapping[str, RayClassWithInitArgs]] = {}

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        for role, spec in self.roles.items():
            worker = spec.cls.__new__(spec.cls)
            worker.rank_info, worker._verl_thread = self.rank_info, self._verl_thread
            spec.cls.__init__(worker, *spec.args, **spec.kwargs)
            self._workers[role] = worker

    def close(self) -> None:
        for worker in reversed(self._workers.values()):
            worker.close()


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


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """A class for a `RayWorkerGroup` whose ranks have a worker of each of `class_dict`, by role.

        group = RayWorkerGroup(pool, create_colocated_worker_cls({"actor": actor, "critic": critic}))
        groups = group.spawn(prefix_set=["actor", "critic"])
        groups["critic"].compute_values(batch)                   # or group.critic_compute_values(batch)

    Methods of both run on the rank's one thread, in the order of the driver's calls.
    """
    if not class_dict:
        raise ValueError("create_colocated_worker_cls needs one role at least")
    members: dict[str, Any] = {"roles": dict(class_dict)}
    for role, spec in class_dict.items():
        if not isinstance(spec, RayClassWithInitArgs):
            raise TypeError(f"create_colocated_worker_cls: role {role!r} needs a RayClassWithInitArgs, not {spec!r}")
        for name in _methods(spec.cls):
            if (method := f"{role}_{name}") in members or hasattr(ColocatedWorkers, method):
                raise TypeError(f"create_colocated_worker_cls: two methods would be called {method!r}")
            members[method] = _forwarded(spec.cls, role, name)
    return RayClassWithInitArgs(type("_".join(class_dict), (ColocatedWorkers,), members))


def groups_by_role(group: RayWorkerGroup, cls: type[Worker], wanted: Iterable[str]) -> dict[str, RoleGroup]:
    """For `RayWorkerGroup.spawn`, whose ranks are made of `cls`."""
    known = cls.roles if issubclass(cls, ColocatedWorkers) else {}
    groups = {role: RoleGroup(group, role) for role in wanted}
    if unknown := [role for role in groups if role not in known]:
        raise ValueError(f"worker group {group.name!r} has no role {unknown[0]!r}; known: {', '.join(known) or 'none'}")
    return groups


def _methods(cls: type[Worker]) -> list[str]:
    """What a driver may call: registered methods, and public ones that not every worker has."""
    public = {name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}
    return sorted((public - set(dir(Worker))) | registrations(cls).keys())


def _forwarded(cls: type[Worker], role: str, name: str) -> Callable[..., Any]:
    """`cls.name` of the worker of `role`; async and registered where that is."""

    async def forward_async(self: ColocatedWorkers, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._workers[role], name)(*args, **kwargs)

    def forward(self: ColocatedWorkers, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._workers[role], name)(*args, **kwargs)

    method = forward_async if inspect.iscoroutinefunction(getattr(cls, name)) else forward
    found = registrations(cls).get(name)
    return register(dispatch_mode=found.dispatch_mode, blocking=found.blocking)(method) if found else method
