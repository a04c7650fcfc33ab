"""Checkpoints in host memory: every rank's training state in arenas that outlive the ranks."""
