"""Several worker classes in one process per rank: `create_colocated_worker_cls`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from verl.single_controller.dispatch import register, registrations
from verl.single_controller.init_args import RayClassWithInitArgs
from verl.single_controller.worker import Worker


class ColocatedWorkers(Worker):
    """One worker of every role. `create_colocated_worker_cls` makes subclasses with the methods of all roles.

    They share the rank's process, its thread for plain methods, and its `RankInfo`.
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


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """A class for a `RayWorkerGroup` whose ranks have a worker of each of `class_dict`, by role.

        group = RayWorkerGroup(pool, create_colocated_worker_cls({"actor": actor, "critic": critic}))
        groups = group.spawn(prefix_set=["actor", "critic"])
        groups["critic"].compute_values(batch)                   # or group.critic_compute_values(batch)

    Methods of all roles run on the rank's one thread, in the order of the driver's calls.
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
