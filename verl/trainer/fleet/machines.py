"""What Ray says about the machines of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from verl.trainer.fleet.placement import Machine


def ray_nodes() -> dict[str, Any]:
    """What Ray says about each node that is alive, by its id."""
    cluster: Any = ray
    return {node["NodeID"]: node for node in cluster.nodes() if node["Alive"]}


def machines(accelerator: str | None) -> dict[str, Machine]:
    """All that are alive, by Ray's id. `accelerator`: Ray's name of those that are counted; None: none are."""
    return {
        name: Machine(
            address=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            accelerators=node["Resources"].get(accelerator, 0.0) if accelerator else 0.0,
        )
        for name, node in ray_nodes().items()
    }


def addresses_of(nodes: Mapping[int, str]) -> dict[int, str]:
    """The address of each, which are Ray's ids."""
    alive = ray_nodes()
    return {index: alive[node]["NodeManagerAddress"] for index, node in nodes.items()}
