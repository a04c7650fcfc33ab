"""torch 2.13: stores and groups outside global state, and properties of modules, tensors and operators.

For FSDP, see `fsdp.py` beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# `torch.distributed` has most of these, too, but exports none of them to a type checker.
from torch._C._distributed_c10d import (
    AllgatherOptions,
    BroadcastOptions,
    HashStore,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = [
    "AllgatherOptions",
    "BroadcastOptions",
    "HashStore",
    "PrefixStore",
    "ProcessGroupGloo",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "allow_amx",
    "changed_by",
    "changes_arguments",
    "children",
    "dump_memory",
    "gloo_group",
    "hccl_class",
    "is_persistent",
    "limit_collectives",
    "make_tensor_without_memory",
    "record_memory",
    "replace_tensors",
    "scale_all",
    "set_timeout",
    "storage_of",
    "tensors_in",
    "without_changing",
]


def gloo_group(store: Store, rank: int, size: int, *, device: Any, threads: int, timeout: timedelta) -> Any:
    """A gloo group over one device of `create_device`.

    `torch.distributed.new_group` takes no options for gloo and joins groups to the process's global ones. The options
    became private in https://github.com/pytorch/pytorch/pull/56531.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [device]
    options._threads = threads
    options._timeout = timeout
    return gloo(store, rank, size, options)


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the timeout of `ProcessGroupNCCL.Options` or `ProcessGroupHCCL.Options`: their constructors do not accept it.

    Private since https://github.com/pytorch/pytorch/pull/56531: `init_process_group` is to set it.
    """
    options._timeout = timeout


def hccl_class(torch_npu: Any) -> Any:
    """torch_npu's `ProcessGroupHCCL`, which it exports nowhere else."""
    return torch_npu._C._distributed_c10d.ProcessGroupHCCL


def limit_collectives(timeout: timedelta) -> None:
    """Set the deadline of every process group of this rank to `timeout`. A group has torch's default otherwise.

    `torch.distributed.set_timeout` will set it (https://github.com/pytorch/pytorch/pull/187387, not in torch 2.13). No
    public name lists the groups.
    """
    for group in distributed_c10d._world.pg_map:
        if isinstance(group, ProcessGroup):  # not one of other ranks
            distributed_c10d._set_pg_timeout(timeout, group)


def allow_amx() -> None:
    """Request AMX tiles from the kernel for this process and those that it forks, if the processor has them.

    The first user of tiles in a process must request them (https://docs.kernel.org/arch/x86/xstate.html); oneDNN does.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def is_persistent(module: torch.nn.Module, name: str) -> bool:
    """Whether a checkpoint holds the buffer `name` of `module` itself.

    `named_buffers` lists both kinds (https://github.com/pytorch/pytorch/issues/85235). A `state_dict` has only
    persistent ones, but gathers sharded tensors.
    """
    return name not in module._non_persistent_buffers_set


def changes_of(tensor: torch.Tensor) -> int:
    """The number of in-place operations on `tensor`; 0 for one made in inference mode, which is not counted."""
    changes: int = 0 if tensor.is_inference() else tensor._version
    return changes


def tied_names(module: torch.nn.Module) -> list[str]:
    """Patterns of the names of tied weights of `module`; empty unless it is a model of transformers."""
    return list(getattr(module, "_tied_weights_keys", None) or ())


def storage_of(tensor: torch.Tensor) -> int:
    """An identity of the storage of `tensor`, which its views share. Unlike `data_ptr` it is never 0."""
    storage: int = tensor.untyped_storage()._cdata
    return storage


def children(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The direct children of `module`, by name: its own dict. `named_children` omits a layer's second name, and names
    without a layer."""
    return module._modules


def replace_tensors(module: torch.nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer with `replacement(tensor)`, tied ones once.

    Only special cases are public: `to`, `to_empty`, `cuda`. `to_empty` loses the values of buffers.
    """
    private: Any = module
    private._apply(replacement)


def make_tensor_without_memory(kind: type[torch.Tensor], shape: Iterable[int], dtype: torch.dtype) -> Any:
    """An instance of `kind` with this shape and no memory. torch documents this private name for wrapper subclasses."""
    return torch.Tensor._make_wrapper_subclass(kind, torch.Size(shape), dtype=dtype)


def scale_all(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply all `tensors` in place, on a device in one kernel. `torch.nn.utils` does so only for `.grad`."""
    torch._foreach_mul_(list(tensors), factor)


def record_memory(*, on: bool) -> None:
    """Start (`on`) or stop recording every allocation on CUDA devices.

    torch documents both functions for memory under their private names: https://github.com/pytorch/pytorch/pull/107660.
    """
    torch.cuda.memory._record_memory_history(enabled="all" if on else None)


def dump_memory(path: str) -> None:
    """Write the recorded allocations to `path`, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]


def changes_arguments(operator: Any) -> bool:
    """Whether `operator`, as a TorchDispatchMode sees it, writes to its arguments."""
    return bool(operator._schema.is_mutable)


def changed_by(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments that `operator` writes to."""
    arguments = operator._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(given.get(argument.name))


def without_changing(operator: Any, changed: Sequence[torch.Tensor]) -> Any:
    """The result of an operator that writes to `changed`, for a TorchDispatchMode that skips the operator."""
    match len(operator._schema.returns):
        case 0:
            return None
        case 1:
            return changed[0]
        case _:
            return tuple(changed)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    return (value for value in tree_iter(values) if isinstance(value, torch.Tensor))
