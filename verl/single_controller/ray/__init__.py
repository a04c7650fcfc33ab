"""verl's import path of worker groups over Ray."""

from verl.single_controller.colocated import create_colocated_worker_cls
from verl.single_controller.init_args import RayClassWithInitArgs
from verl.single_controller.resource_pool import RayResourcePool
from verl.single_controller.worker_group import RayWorkerGroup

__all__ = ["RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup", "create_colocated_worker_cls"]
