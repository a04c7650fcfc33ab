"""Ray's records of the machines of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from verl.trainer.fleet.placement import Machine


def ray_nodes() -> dict[str, Any]:
    """Ray's record of each live node, by its id."""
    cluster: Any = ray
    return {node["NodeID"]: node for node in cluster.nodes() if node["Alive"]}


def machines(accelerator: str | None) -> dict[str, Machine]:
    """All live machines, by Ray's id. `accelerator` is Ray's name of the accelerators to count; None counts none."""
    return {
        name: Machine(
            address=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            accelerators=node["Resources"].get(accelerator, 0.0) if accelerator else 0.0,
        )
        for name, node in ray_nodes().items()
    }


def addresses_of(nodes: Mapping[int, str]) -> dict[int, str]:
    """The address of each Ray node, by id."""
    alive = ray_nodes()
    return {index: alive[node]["NodeManagerAddress"] for index, node in nodes.items()}
