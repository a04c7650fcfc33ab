"""Adapters as tenants: `verl-sync serve`, a server of the Tinker protocol. One base model, and a LoRA adapter each."""
