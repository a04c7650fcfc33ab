"""One-step-off-policy training: see `trainer.py`."""
