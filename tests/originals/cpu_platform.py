"""The CPU as a platform of PyPI's verl, and its engine and models on it."""

import contextlib
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForTokenClassification
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import set_platform

from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl


class Device(ModuleType):
    """`torch.cpu`, with what verl asks of an accelerator's module."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name == "get_device_name":
            return lambda *_: "CPU"
        if name.startswith(("memory_", "max_memory_", "reset_")):
            return lambda *_, **__: 0
        if name == "mem_get_info":
            return lambda *_: (0, 1)
        if name == "get_device_properties":
            return lambda *_: SimpleNamespace(total_memory=1 << 30)
        if name in ("empty_cache", "ipc_collect"):
            return lambda: None
        raise AttributeError(name)


class CPU(PlatformBase):
    """A platform of verl's plug-in interface."""

    device_name, vendor_name, device_module = "cpu", "cpu", Device("torch.cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing is under way."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        """There are none."""

    def empty_cache(self) -> None:
        """There is none."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "NONE"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield

    def profiler_start(self) -> None:
        """Nothing is profiled."""

    profiler_stop = profiler_start

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def use_cpu() -> None:
    """In float32, with the attention that is asked for."""
    set_platform(CPU())
    for backends in EngineRegistry._engines.values():
        for strategy in ("fsdp", "fsdp2"):
            backends[strategy]["cpu"] = backends[strategy]["cuda"]
    offload = transformer_impl.CPUOffloadPolicy
    transformer_impl.CPUOffloadPolicy = lambda **_: offload(pin_memory=False)
    load = AutoModelForTokenClassification.from_pretrained  # which is asked for flash attention
    AutoModelForTokenClassification.from_pretrained = lambda *args, **options: load(
        *args, **{**options, "attn_implementation": "eager"}
    )
    torch.autocast = lambda *_, **__: contextlib.nullcontext()  # to bfloat16 as well
