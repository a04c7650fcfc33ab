"""The device on which this process computes, and torch's functions for it. The only file that imports torch_npu."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import ConfigError, did_you_mean
from .package import extra

if TYPE_CHECKING:
    import torch  # imported where it is used: commands that start nothing ask which device there is

DEVICES = ("cpu", "cuda", "npu")

# Control messages (counts, checkpoint plans) travel as CPU tensors on every device: gloo stands beside its own backend.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


_taken_as_given: ContextVar[bool] = ContextVar("taken_as_given", default=False)


@contextmanager
def any_device() -> Iterator[None]:
    """In this block, every named device counts as present: it checks a configuration for another machine."""
    token = _taken_as_given.set(True)
    try:
        yield
    finally:
        _taken_as_given.reset(token)


def resolve_device(name: str | None = None) -> str:
    """Return `name` if it is known and present on this machine; for None the first of cuda, npu, cpu that is present.

    Raises ConfigError for an unknown name and for a device that this machine or installation lacks.
    """
    if name is None:
        return next((device for device in ("cuda", "npu") if not missing(device)), "cpu")
    if name not in DEVICES:
        raise ConfigError(
            f"unknown device {name!r}; known: {', '.join(DEVICES)}.{did_you_mean(name, DEVICES) if name else ''}"
        )
    if not _taken_as_given.get() and (reason := missing(name)):
        raise ConfigError(f"device {name!r} cannot be used here: {reason}. On this machine: {resolve_device()}")
    return name


def distributed_backend(device: str) -> str:
    """The `backend` argument of `torch.distributed.init_process_group` for a device of `resolve_device`."""
    if device not in _BACKENDS:
        raise ConfigError(f"unknown device {device!r}; known: {', '.join(DEVICES)}")
    return _BACKENDS[device]


def local_device(device: str, local_rank: int = 0) -> torch.device:
    """The torch device of this process. Makes it current on accelerators.

    `local_rank` is taken modulo the devices that this process can see: Ray shows each worker only its own.
    """
    import torch

    if device == "cpu":
        return torch.device("cpu")
    module = device_module(device)
    index = local_rank % module.device_count()
    module.set_device(index)
    return torch.device(device, index)


def seed_everything(seed: int) -> None:
    """Seed Python's and torch's generators, on every device of this process."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)


def rng_state(device: str) -> dict[str, torch.Tensor]:
    """State of torch's generators: `cpu`, and the accelerator's own under its name."""
    import torch

    state = {"cpu": torch.get_rng_state()}
    if device != "cpu":
        state[device] = device_module(device).get_rng_state()
    return state


def set_rng_state(device: str, state: dict[str, torch.Tensor]) -> None:
    """The inverse of `rng_state`."""
    import torch

    torch.set_rng_state(state["cpu"])
    if device != "cpu":
        device_module(device).set_rng_state(state[device])


def allocated(device: str) -> tuple[int, int]:
    """Bytes that torch holds on an accelerator now, and their peak since the last call. For `MemoryWatch.device`."""
    module = device_module(device)
    held: tuple[int, int] = module.memory_allocated(), module.max_memory_allocated()
    module.reset_peak_memory_stats()
    return held


def has_cuda_context() -> bool:
    """Whether this process has begun to use CUDA."""
    import torch

    cuda: Any = torch.cuda
    return bool(cuda.is_initialized())


def current_device_setter() -> Callable[[], None]:
    """A function that gives another thread, which starts with the first CUDA device, this thread's current one."""
    if not has_cuda_context():
        return lambda: None
    import torch

    return partial(torch.cuda.set_device, torch.cuda.current_device())


def missing(device: str) -> str | None:
    """Why `device` cannot be used, or None."""
    if device == "cpu":
        return None
    if device == "cuda":
        if not _built_for_cuda():
            return "this torch is built without CUDA"
        import torch

        return None if torch.cuda.is_available() else "torch sees no CUDA device"
    try:
        importlib.import_module("torch_npu")
    except ImportError as exc:
        return f"torch_npu cannot be imported ({exc}): {extra('npu')}"
    return None if device_module("npu").is_available() else "torch_npu sees no device"


def device_module(device: str) -> Any:
    """torch's module for a device: torch.cuda, torch.npu or torch.cpu."""
    import torch

    return getattr(torch, device)


def _built_for_cuda() -> bool:
    """Whether torch is built for CUDA, or for ROCm under that name; by its file `version.py`, without importing it."""
    found = find_spec("torch")
    file = Path(found.origin).with_name("version.py") if found is not None and found.origin else None
    spec = spec_from_file_location("_version_of_torch", file) if file is not None and file.is_file() else None
    if spec is None or spec.loader is None:
        return True  # let torch itself say
    version: Any = module_from_spec(spec)
    spec.loader.exec_module(version)
    return bool(getattr(version, "cuda", None) or getattr(version, "hip", None))
