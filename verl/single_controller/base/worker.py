"""verl's place for the base class of workers."""

from verl.single_controller.worker import Worker

__all__ = ["Worker"]
