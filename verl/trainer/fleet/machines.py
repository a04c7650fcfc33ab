"""What Ray says about the machines of a run."""

from __future__ import annotations

from typing import Any

import ray

from verl.trainer.fleet.placement import Machine


def ray_nodes() -> dict[str, Any]:
    """What Ray says about each node that is alive, by its id."""
    cluster: Any = ray
    return {node["NodeID"]: node for node in cluster.nodes() if node["Alive"]}


def machines(accelerator: str | None) -> list[Machine]:
    """All that are alive. `accelerator`: Ray's name of those that are counted; None: none are."""
    return [
        Machine(
            address=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            accelerators=node["Resources"].get(accelerator, 0.0) if accelerator else 0.0,
        )
        for node in ray_nodes().values()
    ]
