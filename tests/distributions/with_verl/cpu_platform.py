"""CPUs as a platform of PyPI's verl, which has none. verl imports it where VERL_USE_EXTERNAL_MODULES names it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

sys.modules["megatron"] = None  # type: ignore[assignment] # every process would import it, for 10 s


class CPUModule(ModuleType):
    """What is asked of `torch.cuda` and its like: `torch.cpu`, and nothing for what that lacks."""

    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 2**33, 2**34

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *_, **__: 0)


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = CPUModule("torch.cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # torch takes no number of one

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # of which Ray is told that it has some

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


init_process_group = torch.distributed.init_process_group


def with_one_backend(backend: str | None = None, *arguments: Any, **named: Any) -> None:
    """verl names one backend for the CPU and one for its device."""
    init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *arguments, **named)


torch.distributed.init_process_group = with_one_backend
