"""Where bytes lie: arenas of rollout nodes, packed regions of trainer ranks, and their digests."""
