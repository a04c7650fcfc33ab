"""`RayClassWithInitArgs`: the class and arguments of a worker group's ranks."""

from __future__ import annotations

import inspect
from typing import Any

from ray.actor import ActorClass

from verl.compat.ray import class_behind
from verl.single_controller.worker import Worker


class RayClassWithInitArgs:
    """A `Worker` subclass, or `ray.remote` of one, and the arguments of its `__init__` on every rank."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(cls, ActorClass):
            cls, options = class_behind(cls)
            if options:
                raise TypeError(
                    f"ray.remote({options}): what a rank gets is said by its RayResourcePool; leave the options out"
                )
        if not (inspect.isclass(cls) and issubclass(cls, Worker)):
            raise TypeError(f"RayClassWithInitArgs needs a subclass of Worker, not {cls!r}")
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
