"""Memory of members: arenas of rollout nodes, packed regions of trainer ranks, their digests and deltas."""
