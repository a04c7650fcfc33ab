"""Fully asynchronous training: see `trainer.py`."""
