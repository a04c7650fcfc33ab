"""vLLM 0.32: private names of its workers, engine core and layers. Imported only in vLLM's processes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


ASLEEP = "verl_asleep"
"""The attribute of a worker with the tags of its memory that sleeps."""


def knows_weight_transfer_engine(name: str) -> bool:
    """Whether an engine `name` is registered. `register_engine` refuses a known name, and no public name checks it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    return name in WeightTransferEngineFactory._registry


def let_workers_answer(method: str, answer: Callable[[Any, str, bool, tuple[str, ...]], dict[str, Any]]) -> None:
    """Give workers `method`, for `/collective_rpc`: it calls `answer` with the worker's weight-transfer engine, the
    caller's argument, whether an update is active, and the tags of memory that sleeps. Idempotent.

    vLLM's routes for weight updates return no worker's result, and `worker_extension_cls` belongs to the user.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    def answered(worker: Any, sent: str) -> dict[str, Any]:
        is_active = bool(getattr(worker, "_weight_update_active", False))
        return answer(worker.weight_transfer_engine, sent, is_active, getattr(worker, ASLEEP, ()))

    setattr(WorkerBase, method, answered)


def guard_resume(
    backend: str, method: str, sent: str, refusal: Callable[[Iterable[dict[str, Any]]], str | None]
) -> None:
    """Before an engine core with the weight-transfer `backend` resumes, call `method` with `sent` on its workers. If
    `refusal` of the answers is not None, raise it and stay paused. Does nothing in other processes. Idempotent."""
    core = sys.modules.get("vllm.v1.engine.core")
    if core is None:
        return

    def resume_scheduler(inner: Callable[..., Any], engine: Any) -> Any:
        transfer = engine.vllm_config.weight_transfer_config
        if transfer is not None and transfer.backend == backend:
            why = refusal(engine.model_executor.collective_rpc(method, args=(sent,)))
            if why is not None:
                raise RuntimeError(why)
        return inner(engine)

    put_around(core.EngineCore, resume_scheduler.__name__, resume_scheduler)


def keep_what_is_seen() -> None:
    """Give workers all pictures of a prompt, those of its cached part, too. Idempotent.

    vLLM leaves these out, as nobody has to look at them. But a request that is computed again from its beginning, after
    a sync or because memory is short, looks at all: `Encoder cache miss` ended the engine.
    """
    from vllm.v1.core.sched import output

    if hasattr(output, "strip_covered_mm_data"):
        output.strip_covered_mm_data = lambda features, *_, **__: features


def note_sleep() -> None:
    """Make workers record the tags of their memory that sleeps, because vLLM's `/is_sleeping` is also true for a paused
    server. Called in a worker's process. Idempotent."""
    from vllm.v1.worker.gpu_worker import Worker

    def sleep(inner: Callable[..., None], worker: Any, *arguments: Any, **named: Any) -> None:
        inner(worker, *arguments, **named)
        setattr(worker, ASLEEP, ("weights", "kv_cache"))

    def wake_up(inner: Callable[..., None], worker: Any, tags: list[str] | None = None) -> None:
        inner(worker, tags)
        woken = getattr(worker, ASLEEP, ()) if tags is None else tags
        setattr(worker, ASLEEP, tuple(tag for tag in getattr(worker, ASLEEP, ()) if tag not in woken))

    def discard(inner: Callable[..., None], worker: Any, tags: tuple[str, ...]) -> None:
        inner(worker, tags)
        setattr(worker, ASLEEP, tuple(dict.fromkeys((*getattr(worker, ASLEEP, ()), *tags))))

    for around in (sleep, wake_up, discard):
        if hasattr(Worker, around.__name__):  # not every vLLM gives back its KV cache alone
            put_around(Worker, around.__name__, around)


def put_around(cls: type, method: str, around: Callable[..., Any]) -> None:
    """Make `cls.method` call `around(inner, worker, ...)`. Idempotent for each `around`: two distributions may have an
    engine each."""
    inner = getattr(cls, method)
    place, layer = f"{around.__module__}.{method}", inner
    while layer is not None:
        if getattr(layer, "adapted_by", None) == place:
            return
        layer = getattr(layer, "__wrapped__", None)

    @functools.wraps(inner)
    def outer(worker: Any, *arguments: Any, **named: Any) -> Any:
        return around(inner, worker, *arguments, **named)

    outer.adapted_by = place  # type: ignore[attr-defined]
    setattr(cls, method, outer)


@contextmanager
def own_rotary_tables() -> Iterator[None]:
    """In this block, a new model gets its own tables of rotary embeddings.

    vLLM shares them between all models of a process, in a dict that only `shutdown` of its model runner clears.
    """
    from vllm.model_executor.layers import rotary_embedding

    shared = dict(rotary_embedding._ROPE_DICT)
    rotary_embedding._ROPE_DICT.clear()
    try:
        yield
    finally:
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(shared)


def load_numel(parameter: torch.Tensor) -> int:
    """The number of elements that the loader of `parameter` fills: without declared padding (vLLM 0.31 and later)."""
    return int(getattr(parameter, "weight_loader_numel", parameter.numel()))


def know_own_experts(layer: Any) -> None:
    """Compute the expert map of a `layer` that was built on the meta device: the experts that its rank holds.

    The map was built on the meta device, too, and its manager's `update` leaves it there.
    """
    import torch

    with torch.device("cpu"):
        layer.expert_map_manager._calculate_expert_maps()


@dataclass(frozen=True)
class PackedProduct:
    """A matrix packed by oneDNN, which supports multiplication only."""

    multiply: Callable[[torch.Tensor], torch.Tensor]
    num_inputs: int
    num_outputs: int


def packed_product(value: Any) -> PackedProduct | None:
    """The packed matrix of `value`, if that is vLLM's handle of one, else None.

    vLLM's layers for CPUs keep no other form of their weights. The whole module of the handle is private.
    """
    from vllm import _custom_ops as ops

    if not isinstance(value, ops.CPUDNNLGEMMHandler) or value.handler_tensor is None:
        return None
    return PackedProduct(lambda rows: ops.onednn_mm(value, rows, None), value.k, value.n)
