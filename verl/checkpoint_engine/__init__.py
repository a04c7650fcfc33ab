"""Weights from trainers to rollout engines as transactions. See docs/architecture.md."""
