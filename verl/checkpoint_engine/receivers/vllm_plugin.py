"""The function that vLLM calls in each of its processes, through the entry-point group `vllm.general_plugins`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading

ENGINE_NAME = "verl_arena"
"""What to write in vLLM's `weight_transfer_config` to have weights loaded from a node arena."""


def register() -> None:
    """Make `ENGINE_NAME` known to vLLM. Idempotent: vLLM may load its plugins more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            ENGINE_NAME, "verl.checkpoint_engine.receivers.vllm_engine", "ArenaWeightTransferEngine"
        )
    end_with_parent()


def end_with_parent() -> None:
    """Have this process killed when the process that started it is gone. Does nothing in vLLM's client process.

    vLLM's workers watch the engine core, but the engine core does not watch its client: after a SIGKILL of the client,
    all of them would stay, with the memory of the model, and nobody could reach them. A parent-death signal of the
    kernel (PR_SET_PDEATHSIG) would follow the thread that started us, which may end before its process does.
    """
    parent = multiprocessing.parent_process()
    watching = any(thread.name == _WATCH for thread in threading.enumerate())
    if parent is None or parent.pid is None or watching or not hasattr(os, "pidfd_open"):
        return
    threading.Thread(target=_watch, args=(parent.pid,), name=_WATCH, daemon=True).start()


_WATCH = "verl-parent-watch"


def _watch(parent: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(parent)], [], [])  # readable once the process has ended
    os.kill(os.getpid(), signal.SIGKILL)
