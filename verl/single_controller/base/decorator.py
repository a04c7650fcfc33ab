"""verl's import path of the decorator for workers' methods."""

from verl.single_controller.dispatch import Dispatch, Execute, register

__all__ = ["Dispatch", "Execute", "register"]
