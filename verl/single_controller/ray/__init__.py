"""verl's place for worker groups over Ray."""

from verl.single_controller.resource_pool import RayResourcePool
from verl.single_controller.worker_group import RayClassWithInitArgs, RayWorkerGroup

__all__ = ["RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup"]
