"""torch 2.13: stores and groups that belong to no global state, and what modules know of their tensors.

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
    """Of `ProcessGroupNCCL.Options` and `ProcessGroupHCCL.Options`, whose constructors do not take it.

    Private since https://github.com/pytorch/pytorch/pull/56531: `init_process_group` is to set it.
    """
    options._timeout = timeout


def hccl_class(torch_npu: Any) -> Any:
    """torch_npu's `ProcessGroupHCCL`, which it exports nowhere else."""
    return torch_npu._C._distributed_c10d.ProcessGroupHCCL


def limit_collectives(timeout: timedelta) -> None:
    """Give every process group of this rank the deadline `timeout`; a group takes torch's own unless told otherwise.

    `torch.distributed.set_timeout` will do for the second half (https://github.com/pytorch/pytorch/pull/187387, not in
    torch 2.13). No public name lists the groups.
    """
    for group in distributed_c10d._world.pg_map:
        if isinstance(group, ProcessGroup):  # not one of other ranks
            distributed_c10d._set_pg_timeout(timeout, group)


def allow_amx() -> None:
    """Have the kernel let this process, and those that it forks, use a processor's AMX tiles, if it has them.

    The first who computes with them has to ask (https://docs.kernel.org/arch/x86/xstate.html); oneDNN does.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def is_persistent(module: torch.nn.Module, name: str) -> bool:
    """Whether a checkpoint holds the buffer `name` of `module` itself.

    `named_buffers` does not tell them apart (https://github.com/pytorch/pytorch/issues/85235). A `state_dict` does, but
    gathers what is sharded.
    """
    return name not in module._non_persistent_buffers_set


def changes_of(tensor: torch.Tensor) -> int:
    """A count that every operation in place adds to; 0 for what was made in inference mode, which has none."""
    changes: int = 0 if tensor.is_inference() else tensor._version
    return changes


def tied_names(module: torch.nn.Module) -> list[str]:
    """Patterns of the names of weights that `module` ties, if it is a model of transformers."""
    return list(getattr(module, "_tied_weights_keys", None) or ())


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the memory of `tensor`, which views share, also where that is none: `data_ptr` is 0 there."""
    storage: int = tensor.untyped_storage()._cdata
    return storage


def children(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The layers right below `module`, by name: its own dict. `named_children` names a layer that is there twice once,
    and leaves out a name without one."""
    return module._modules


def replace_tensors(module: torch.nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put `replacement(tensor)` in the place of all parameters and buffers, tied ones once.

    Public are its special cases only: `to`, `to_empty`, `cuda`. `to_empty` takes the values of buffers.
    """
    private: Any = module
    private._apply(replacement)


def make_tensor_without_memory(kind: type[torch.Tensor], shape: Iterable[int], dtype: torch.dtype) -> Any:
    """An instance of `kind` of that shape. How torch documents subclasses that only wrap, private by its name alone."""
    return torch.Tensor._make_wrapper_subclass(kind, torch.Size(shape), dtype=dtype)


def scale_all(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply all in place, on a device in one kernel. `torch.nn.utils` does it to gradients in `.grad` alone."""
    torch._foreach_mul_(list(tensors), factor)


def record_memory(*, on: bool) -> None:
    """Note every allocation on CUDA devices, until told otherwise.

    torch documents both functions for memory under their private names: https://github.com/pytorch/pytorch/pull/107660.
    """
    torch.cuda.memory._record_memory_history(enabled="all" if on else None)


def dump_memory(path: str) -> None:
    """Write what `record_memory` has noted, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]


def changes_arguments(operator: Any) -> bool:
    """Of an operator that a TorchDispatchMode sees: whether it writes into what it is given."""
    return bool(operator._schema.is_mutable)


def changed_by(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments that `operator` writes into."""
    arguments = operator._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(given.get(argument.name))


def without_changing(operator: Any, changed: Sequence[torch.Tensor]) -> Any:
    """What an operator that writes into `changed` gives back, for a TorchDispatchMode that does not let it."""
    match len(operator._schema.returns):
        case 0:
            return None
        case 1:
            return changed[0]
        case _:
            return tuple(changed)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples and dicts of them, however deep."""
    return (value for value in tree_iter(values) if isinstance(value, torch.Tensor))
