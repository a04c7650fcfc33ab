"""Rollout engines by name. Built-ins are strings that are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.checkpoint_engine.errors import BackendUnavailable
from verl.checkpoint_engine.support.registry import Builtin, Registry

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
