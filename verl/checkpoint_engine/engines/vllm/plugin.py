"""The function that vLLM calls in each of its processes, through the entry-point group `vllm.general_plugins`."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from typing import Any

import msgspec

from ...compat.vllm import guard_resume, keep_what_is_seen, knows_weight_transfer_engine, let_workers_answer
from ...compat.vllm_0_24 import adapt_workers, makes_engines_of_less
from ...parameter_server.endpoints import ANSWERS, ENGINE_NAME, NO_ENGINE
from ...parameter_server.writers import order
from ...support.lifetime import end_with
from .deaths import tell_deaths


def register() -> None:
    """Make `ENGINE_NAME` known to vLLM. Idempotent: vLLM may load its plugins more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from ...compat.torch import allow_amx

    name = "ArenaWeightTransferEngine"
    if makes_engines_of_less():
        adapt_workers(ENGINE_NAME)
        name = "ArenaEngineOfLess"
    if not knows_weight_transfer_engine(ENGINE_NAME):
        WeightTransferEngineFactory.register_engine(ENGINE_NAME, f"{__package__}.receiver", name)
    let_workers_answer(ANSWERS, answer_of)
    guard_resume(ENGINE_NAME, ANSWERS, msgspec.json.encode(order("look")).decode(), refusal_to_resume)
    keep_what_is_seen()
    allow_amx()  # vLLM's attention on CPUs uses it in bfloat16, and is killed where nothing else has asked before
    end_with_parent()
    tell_deaths()


def answer_of(engine: Any, order: str, active: bool, asleep: tuple[str, ...]) -> dict[str, Any]:
    """A worker's answer to an `Order`. Never raises: vLLM's executor would leave other workers' answers unread."""
    if not hasattr(engine, "answer"):
        return NO_ENGINE
    try:
        found: dict[str, Any] = engine.answer(order, active=active, asleep=asleep)
    except Exception as exc:  # noqa: BLE001 - who asks says it
        found = {"failed": f"{type(exc).__name__}: {exc}"}
    return found


def refusal_to_resume(answers: Iterable[dict[str, Any]]) -> str | None:
    """Why an engine must not resume, by its workers' answers (`writers.Answer`); None if it may."""
    if any(answer.get("torn") for answer in answers):
        return (
            "the engine does not go on: a load of weights has begun and not ended, and what it holds is no version. "
            "Load one first: a push or an update does, and has it go on"
        )
    return None


def end_with_parent() -> None:
    """Kill this process when its parent process is gone. Does nothing in vLLM's client process.

    vLLM's workers watch the engine core, but the engine core does not watch its client. After a SIGKILL of the client
    all of them would stay, unreachable and with the memory of the model.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        end_with(parent.pid)
