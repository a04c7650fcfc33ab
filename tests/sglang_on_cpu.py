"""SGLang on a machine with neither kernels nor an accelerator: the real engine, with stand-ins for what it lacks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verl.trainer.fleet.warm import ray_worker
from verl.workers.rollout import RolloutReplicaRegistry
from verl.workers.rollout.sglang.replica import SGLangReplica

HERE = Path(__file__).parent
PACKAGE = HERE.parent / ".venv/sglang"
"""Where `make sglang` puts it: beside the environment, whose packages it would want in other versions."""
STAND_INS = HERE / "sglang_stand_ins"
PROGRAM = {"PYTHONPATH": os.pathsep.join(map(str, (STAND_INS, PACKAGE, HERE.parent)))}
"""Environment variables of a program that finds both."""
NEEDS_SGLANG = pytest.mark.skipif(not (PACKAGE / "sglang").exists(), reason="SGLang is not there: make sglang")


@RolloutReplicaRegistry.register("sglang-on-cpu")
class SGLangOnCPU(SGLangReplica):
    """Its server, and the processes that this starts, find SGLang and the stand-ins; no other process does."""

    def env_vars(self) -> dict[str, str]:
        path = f"{STAND_INS}{os.pathsep}{PACKAGE}"
        return super().env_vars() | {"PYTHONPATH": path, ray_worker.SOCKET: ""}
