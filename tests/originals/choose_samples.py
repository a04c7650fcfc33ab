"""Which samples of a validation PyPI's verl shows, and what its services get.

Run as a file with PyPI's verl in front. A JSON list of {samples, count, services} comes in. Prints a JSON list of
[chosen samples, calls by service], calls as [name, arguments by place, arguments by name].
"""

import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl.trainer.ppo.ray_trainer import RayPPOTrainer

PACKAGES = ("wandb", "swanlab", "trackio")
calls: list[Any] = []


class Recorder:
    """Any name of a package; remembers its calls."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(f"{self.path}.{name}")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        calls.append([self.path, arguments, named])
        return Recorder(f"{self.path}()")


def told(value: Any) -> str:
    return str(value) if isinstance(value, Path) else "..."


def shown(given: dict[str, Any]) -> list[Any]:
    from verl.utils.tracking import ValidationGenerationsLogger

    found: list[Any] = []
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(trainer=SimpleNamespace(log_val_generations=given["count"], logger=[])),
        validation_generations_logger=SimpleNamespace(log=lambda services, samples, step: found.extend(samples)),
        global_steps=1,
    )
    columns = [list(column) for column in zip(*given["samples"], strict=True)]
    RayPPOTrainer._maybe_log_val_generations(trainer, *columns)
    by_service = {}
    for service in given["services"]:
        calls.clear()
        ValidationGenerationsLogger().log([service], [tuple(each) for each in found], 7)
        by_service[service] = json.loads(json.dumps(calls, default=told))
    return [found, by_service]


if __name__ == "__main__":
    for name in PACKAGES:
        module = types.ModuleType(name)
        module.__getattr__ = Recorder(name).__getattr__  # type: ignore[method-assign]
        sys.modules[name] = module
    sys.stdout.write("\n" + json.dumps([shown(each) for each in json.load(sys.stdin)]))
