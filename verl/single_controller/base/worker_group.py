"""verl's place for the base of worker groups."""

from verl.single_controller.base import ClassWithInitArgs, ResourcePool, WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "WorkerGroup"]
