"""verl's names for what does not depend on Ray there. Here there is one implementation, and it is Ray's."""

from verl.single_controller.init_args import RayClassWithInitArgs as ClassWithInitArgs
from verl.single_controller.resource_pool import RayResourcePool as ResourcePool
from verl.single_controller.worker import Worker
from verl.single_controller.worker_group import RayWorkerGroup as WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
