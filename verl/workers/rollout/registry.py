"""Rollout engines by name. Built-ins are strings that are imported on first use."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from verl.checkpoint_engine.errors import BackendUnavailable
from verl.checkpoint_engine.support.registry import Builtin, Registry, imported, require_methods, require_subclass

if TYPE_CHECKING:
    from verl.workers.rollout.base import RolloutReplica

BUILTIN = {
    "vllm": Builtin(
        target="verl.workers.rollout.vllm.replica:VLLMReplica",
        package="vllm",
        remedy="pip install 'verl-sync[cuda]' on a CUDA machine; on a CPU machine `make install`, or pip install "
        "'verl-sync[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu; or rollout.name=hf",
    ),
    "sglang": Builtin(
        target="verl.workers.rollout.sglang.replica:SGLangReplica",
        package="sglang",
        remedy="pip install sglang==0.5.23 into an environment of its own for a CUDA machine, and verl-sync beside it",
    ),
    "hf": Builtin(
        target="verl.workers.rollout.hf.replica:HFReplica",
        package="transformers",
        remedy="pip install verl-sync",
    ),
}
RolloutReplicaRegistry: Registry[type[RolloutReplica]] = Registry(
    "rollout.name", builtin=BUILTIN, missing=BackendUnavailable
)
"""`rollout.name` -> replica class. `register` adds a user's class."""


def require_rollout(name: str) -> None:
    """Raises ConfigError for an unknown engine, and for one of a user's whose classes lack a method or an argument;
    BackendUnavailable for a missing package. Called on the driver, where the engine's module may be absent."""
    RolloutReplicaRegistry.require_present(name)
    if name not in RolloutReplicaRegistry.functions:
        return
    from verl.workers.rollout.base import RolloutReplica
    from verl.workers.rollout.engine import Engine

    found, what = RolloutReplicaRegistry.get(name), f"rollout.name={name}"
    require_subclass(found, RolloutReplica, what, ("engine",))
    with suppress(ImportError):  # the server's process may have what this one lacks
        require_methods(imported(found.engine), Engine, what, () if found.can_sleep_on else ("sleep", "wake"))
