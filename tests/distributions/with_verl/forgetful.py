"""What `model.external_lib` names: the shards of verl's engine, and servers that are not told of one version."""

from __future__ import annotations

from verl_sync.for_verl import rollout, shards  # noqa: F401 - its engine goes into verl's registry

FORGOTTEN = 3
activate = rollout.VllmServer.activate


async def activate_others(self: rollout.VllmServer, arena_path: str, version: int) -> None:
    if version != FORGOTTEN:
        await activate(self, arena_path, version)


rollout.VllmServer.activate = activate_others
