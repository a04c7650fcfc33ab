"""Runs on three Ray nodes of this machine, in a process of its own.

    python -m tests.e2e.several_nodes <directory> <model> <Ray's runtime environment, JSON>

Prints, as JSON, what the tests look at.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

from tests.e2e.job import in_process
from tests.e2e.remembering import remember
from tests.warm_workers import lighten_ray
from verl.protocol import DataProto
from verl.single_controller.resource_pool import NODE_ID_LABEL
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.step import Step
from verl.utils.config import ConfigError
from verl.utils.tracking import read_metrics

NODES = 3
NOTICED_S = 240.0
"""Ray takes half a minute to notice that a node is gone, and longer on a machine that is busy."""
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
            "remembered": remember(_keepers),
            "refused": _refusal(directory / "refused", *common, "trainer.nnodes=4"),
            "fewer": _run(
                directory / "fewer",
                *common,
                "trainer.placement=separate",
                "checkpoint_engine.backend=gloo",
                "trainer.total_training_steps=3",
                "trainer.min_ranks=1",
                "algorithm.adv_estimator=gae",
                "critic.ppo_mini_batch_size=4",
                "trainer.restart_wait_s=5",
                trainer_class=type("LosesAHost", (LosesAHost,), {"ray_cluster": cluster}),
            ),
            "moved": _run(
                _replenished(cluster, directory) / "moved",
                *common,
                "trainer.placement=separate",
                "checkpoint_engine.backend=gloo",
                "trainer.total_training_steps=3",
                trainer_class=type("LosesAHost", (LosesAHost,), {"ray_cluster": cluster, "occupies_others": False}),
            ),
        }
    finally:
        ray.shutdown()
        cluster.shutdown()


def _replenished(cluster: Cluster, directory: Path) -> Path:
    """`directory`, once there are as many nodes as at first: Ray has noticed which is gone, and has another."""
    deadline = time.monotonic() + NOTICED_S
    while sum(node["Alive"] for node in ray.nodes()) >= NODES:
        assert time.monotonic() < deadline, ray.nodes()
        time.sleep(0.2)
    cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    return directory


class LosesAHost(RayPPOTrainer):
    """A host of a trainer rank is gone while the third step is learned. Others have no room for it, if it
    `occupies_others`; if not, a new host comes, too."""

    ray_cluster: Cluster
    occupies_others = True
    is_lost = False

    def learn(self, batch: DataProto, now: Step) -> DataProto:
        if now.number == 3 and not self.is_lost:
            self.is_lost = True
            used = self.cluster.trainer_ranks.nodes
            for node, free in _state().available_resources_per_node().items():
                if node not in used and self.occupies_others:
                    occupied = placement_group([{"CPU": free["CPU"]}], bundle_label_selector=[{NODE_ID_LABEL: node}])
                    assert occupied.wait(240)
            head = self.ray_cluster.head_node
            nodes = self.ray_cluster.list_all_nodes()
            lost = next(node for node in nodes if node.node_id in used and node is not head)
            if not self.occupies_others:
                self.ray_cluster.add_node(**NODE)
            self.ray_cluster.remove_node(lost, allow_graceful=False)
        return super().learn(batch, now)


def _run(directory: Path, *overrides: str, **how: Any) -> dict[str, Any]:
    before = set(_actors())
    result = in_process(directory, *overrides, **how)
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


def _keepers() -> list[int]:
    """Process ids of those that keep states of trainer ranks."""
    return [
        actor["Pid"]
        for actor in _actors().values()
        if actor["ActorClassName"] == "StateKeeper" and actor["State"] == "ALIVE"
    ]


def _refusal(directory: Path, *overrides: str) -> str:
    try:
        in_process(directory, *overrides)
    except ConfigError as exc:
        return str(exc)
    return ""


def _actors() -> dict[str, Any]:
    """Every actor that there is or was, by its id."""
    return _state().actors()


def _state() -> Any:
    return importlib.import_module("ray._private.state")


if __name__ == "__main__":
    found = main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
    print(f"\n{json.dumps(found)}")
