"""verl's import path of the worker groups' base."""

from verl.single_controller.base import ClassWithInitArgs, ResourcePool, WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "WorkerGroup"]
