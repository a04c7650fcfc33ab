"""verl's import path of the workers' base class."""

from verl.single_controller.worker import Worker

__all__ = ["Worker"]
