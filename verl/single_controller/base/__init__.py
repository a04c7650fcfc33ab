"""verl's names of parts that are independent of Ray there. Here Ray's is the only implementation."""

from verl.single_controller.init_args import RayClassWithInitArgs as ClassWithInitArgs
from verl.single_controller.resource_pool import RayResourcePool as ResourcePool
from verl.single_controller.worker import Worker
from verl.single_controller.worker_group import RayWorkerGroup as WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
