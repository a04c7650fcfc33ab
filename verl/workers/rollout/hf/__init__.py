"""Plain transformers as a rollout engine: small, slow, quick to start."""
