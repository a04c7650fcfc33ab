"""The checkpoint engine's members as Ray actors: trainer ranks, rollout nodes."""
