"""verl's place for what marks the methods of workers."""

from verl.single_controller.dispatch import Dispatch, Execute, register

__all__ = ["Dispatch", "Execute", "register"]
