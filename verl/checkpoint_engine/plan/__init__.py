"""Layouts, shards, owners and topologies: which bytes go from which rank to which node. No torch, no I/O."""
