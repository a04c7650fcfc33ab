"""Runs on three Ray nodes of this machine, in a process of its own.

    python -m tests.e2e.several_nodes <directory> <model> <Ray's runtime environment, JSON>

Prints, as JSON, what the tests look at.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from tests.e2e.job import in_process
from tests.warm_workers import lighten_ray
from verl.utils.config import ConfigError
from verl.utils.tracking import read_metrics

NODES = 3
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 2**27}
"""Each has room for all ranks."""
COMMON = (
    "trainer.nnodes=2",
    "trainer.n_gpus_per_node=1",
    "trainer.num_cpus_per_rank=0.6",
    "trainer.total_training_steps=1",
)


def main(directory: Path, model: str, runtime_env: dict[str, Any]) -> dict[str, Any]:
    common = [*COMMON, f"actor_rollout_ref.model.path={model}"]
    lighten_ray()
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error", runtime_env=runtime_env)
        cluster.wait_for_nodes()
        return {
            "separate": _run(
                directory / "separate",
                *common,
                "trainer.placement=separate",
                "checkpoint_engine.backend=gloo",
                "trainer.save_freq=1",
            ),
            "colocated": _run(directory / "colocated", *common, "checkpoint_engine.backend=naive"),
            "refused": _refusal(directory / "refused", *common, "trainer.nnodes=4"),
        }
    finally:
        ray.shutdown()
        cluster.shutdown()


def _run(directory: Path, *overrides: str) -> dict[str, Any]:
    before = set(_actors())
    result = in_process(directory, *overrides)
    nodes: dict[str, list[str]] = {}
    for name, actor in _actors().items():
        if name not in before:
            nodes.setdefault(actor["ActorClassName"], []).append(actor["Address"]["NodeID"])
    out = directory / "out"
    return {
        "step": result.step,
        "nodes": nodes,
        "reports": [json.loads(line) for line in (out / "sync_reports.jsonl").read_text().splitlines()],
        "metrics": list(read_metrics(out / "metrics.jsonl")),
        "saved": sorted(path.name for path in out.glob("global_step_1/actor/*")),
    }


def _refusal(directory: Path, *overrides: str) -> str:
    try:
        in_process(directory, *overrides)
    except ConfigError as exc:
        return str(exc)
    return ""


def _actors() -> dict[str, Any]:
    """Every actor that there is or was, by its id."""
    state: Any = importlib.import_module("ray._private.state")
    return state.actors()


if __name__ == "__main__":
    found = main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
    print(f"\n{json.dumps(found)}")
