"""Models and data that the project makes itself, so that it runs where nothing can be downloaded."""

from verl.utils.builtin.tiny import ARCHITECTURES, make_tiny_model

__all__ = ["ARCHITECTURES", "make_tiny_model"]
