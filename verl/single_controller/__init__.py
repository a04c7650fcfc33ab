"""One driver, many ranks: worker groups over Ray and the dispatch of batches over their ranks."""

from verl.single_controller.colocated import create_colocated_worker_cls
from verl.single_controller.dispatch import Dispatch, Execute, register
from verl.single_controller.errors import (
    PlacementError,
    WorkerDied,
    WorkerFailed,
    WorkerGroupClosed,
    WorkerGroupError,
    WorkerTimeout,
)
from verl.single_controller.future import WorkerFuture
from verl.single_controller.init_args import RayClassWithInitArgs
from verl.single_controller.resource_pool import RayResourcePool
from verl.single_controller.worker import RankInfo, Worker
from verl.single_controller.worker_group import RayWorkerGroup

__all__ = [
    "Dispatch",
    "Execute",
    "PlacementError",
    "RankInfo",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "Worker",
    "WorkerDied",
    "WorkerFailed",
    "WorkerFuture",
    "WorkerGroupClosed",
    "WorkerGroupError",
    "WorkerTimeout",
    "create_colocated_worker_cls",
    "register",
]
