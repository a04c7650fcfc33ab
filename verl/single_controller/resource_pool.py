"""`RayResourcePool`: the CPUs and accelerators of one or more worker groups."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.single_controller.errors import PlacementError
from verl.utils.device import resolve_device

REMOVE_TIMEOUT_S = 5.0
NODE_ID_LABEL = "ray.io/node-id"
"""Ray's label of every node with the node's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one rank. `options` are the resources and placement of its Ray actor."""

    rank: int
    local_rank: int
    local_world_size: int
    options: dict[str, Any]


class RayResourcePool:
    """One bundle of resources per rank; the bundles of one entry of `process_on_nodes` lie on one Ray node.

    Creates placement groups for the first worker group, and removes them when the last one has released them. Ray may
    place two entries on one node with room for both, unless `distinct_nodes` is set: then each entry has its own node.
    `max_colocate_count` groups can share the pool: each rank then gets `num_cpus_per_process` CPUs and an equal part of
    its bundle's accelerator.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        *,
        num_cpus_per_process: float = 0.4,
        use_accelerator: str | None = None,
        use_gpu: bool = False,
        max_colocate_count: int = 1,
        distinct_nodes: bool = False,
        nodes: Sequence[str | None] = (),
        name_prefix: str | None = "pool",
        placement_timeout_s: float = 60.0,
    ) -> None:
        """`use_accelerator` is the Ray resource of which every bundle has one: GPU, NPU, or None.

        `use_gpu` is verl's option for the accelerator of this machine. `nodes` has, for each entry, Ray's id of its
        node, or None for any; empty means any node for all.
        """
        if not process_on_nodes or min(process_on_nodes) < 1:
            raise ValueError(f"process_on_nodes must list at least one node with one process, not {process_on_nodes}")
        if nodes and len(nodes) != len(process_on_nodes):
            raise ValueError(f"nodes has {len(nodes)} entries, and process_on_nodes {len(process_on_nodes)}")
        if max_colocate_count < 1:
            raise ValueError(f"max_colocate_count must be 1 or more, not {max_colocate_count}")
        self.process_on_nodes = tuple(process_on_nodes)
        self.num_cpus_per_process = num_cpus_per_process
        if use_gpu and use_accelerator is None:
            use_accelerator = "NPU" if resolve_device() == "npu" else "GPU"
        self.use_accelerator = use_accelerator
        self.max_colocate_count = max_colocate_count
        self.distinct_nodes = distinct_nodes
        self.nodes = tuple(nodes) or (None,) * len(process_on_nodes)
        self.name = name_prefix or "pool"
        self.placement_timeout_s = placement_timeout_s
        self._placement_groups: list[PlacementGroup] = []
        self._users: list[object] = []

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    def place(self) -> None:
        """Reserve room for all ranks until the last `release`, as `acquire` does first. Raises PlacementError."""
        if self._placement_groups:
            return
        try:
            self._place()
        except BaseException:
            self._remove()
            raise

    @property
    def placed_on(self) -> list[str]:
        """Ray's id of the node of each entry, once there is room for all."""
        return [_node_of(group) for group in self._placement_groups]

    def acquire(self, user: object) -> list[Slot]:
        """A slot per rank for `user`, a worker group. Waits at most `placement_timeout_s`; raises PlacementError."""
        if len(self._users) >= self.max_colocate_count:
            raise PlacementError(
                f"resource pool {self.name!r} already hosts {len(self._users)} worker groups and "
                f"max_colocate_count={self.max_colocate_count}",
                group=self.name,
            )
        self.place()
        self._users.append(user)
        slots: list[Slot] = []
        for group, size in zip(self._placement_groups, self.process_on_nodes, strict=True):
            slots += [
                Slot(
                    rank=len(slots) + local_rank,
                    local_rank=local_rank,
                    local_world_size=size,
                    options=self._actor_options(group, local_rank),
                )
                for local_rank in range(size)
            ]
        return slots

    def release(self, user: object) -> None:
        """Undo `acquire`. After the last user Ray gets the resources back, and ends processes that still use them."""
        if user in self._users:
            self._users.remove(user)
        if not self._users:
            self._remove()

    def _place(self) -> None:
        bundle = {"CPU": self.num_cpus_per_process * self.max_colocate_count}
        if self.use_accelerator:
            bundle[self.use_accelerator] = 1.0
        unique = uuid.uuid4().hex[:8]  # Ray wants unique names; two pools may have the same
        deadline = time.monotonic() + self.placement_timeout_s

        def is_placed(group: PlacementGroup) -> bool:
            return group.wait(timeout_seconds=max(0.0, deadline - time.monotonic()))

        taken = [wanted for wanted in self.nodes if wanted is not None]
        for node, (size, wanted) in enumerate(zip(self.process_on_nodes, self.nodes, strict=True)):
            where = {NODE_ID_LABEL: wanted} if wanted is not None else {}
            if self.distinct_nodes and wanted is None and taken:
                where = {NODE_ID_LABEL: f"!in({','.join(taken)})"}
            group = placement_group(
                [bundle] * size,
                strategy="STRICT_PACK",
                name=f"{self.name}-node{node}-{unique}",
                bundle_label_selector=[where] * size,
            )
            self._placement_groups.append(group)
            if self.distinct_nodes and wanted is None and is_placed(group):
                taken.append(_node_of(group))
        missing = [node for node, group in enumerate(self._placement_groups) if not is_placed(group)]
        if missing:
            raise PlacementError(self._shortage(bundle, missing), group=self.name)

    def _shortage(self, bundle: dict[str, float], unplaced: list[int]) -> str:
        kinds = list(bundle)
        needed = "; ".join(
            f"{self.process_on_nodes[node]} processes on one node with {bundle} each" for node in unplaced
        )
        available: Callable[[], dict[str, float]] = ray.available_resources
        nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
        free = {kind: available().get(kind, 0.0) for kind in kinds}
        totals = [{kind: node["Resources"].get(kind, 0.0) for kind in kinds} for node in nodes() if node["Alive"]]
        return (
            f"resource pool {self.name!r} got no place within {self.placement_timeout_s} s: needed are {needed}; "
            f"the cluster has free {free}, its nodes have in total {totals}"
        )

    def _actor_options(self, group: PlacementGroup, bundle_index: int) -> dict[str, Any]:
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus_per_process,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle_index
            ),
        }
        share = 1.0 / self.max_colocate_count
        if self.use_accelerator == "GPU":
            options["num_gpus"] = share
        elif self.use_accelerator:
            options["resources"] = {self.use_accelerator: share}
        return options

    def _remove(self) -> None:
        """With a deadline: when its daemon is dead, Ray answers after a minute, and nothing is left to remove."""
        groups, self._placement_groups = self._placement_groups, []
        if groups:
            removing = threading.Thread(target=lambda: [remove_placement_group(group) for group in groups], daemon=True)
            removing.start()
            removing.join(REMOVE_TIMEOUT_S)


def _node_of(group: PlacementGroup) -> str:
    """The node on which all bundles of a placed `group` lie."""
    table: dict[str, Any] = placement_group_table(group)
    node_ids: dict[int, str] = table["bundles_to_node_id"]
    return node_ids[0]
