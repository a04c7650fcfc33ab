"""Pictures in prompts: what passes between processes, and what a model is given in its place."""

from verl.utils.pictures.picture import Picture, PictureError, keep
from verl.utils.pictures.processing import PictureProcessor, load_processor

__all__ = ["Picture", "PictureError", "PictureProcessor", "keep", "load_processor"]
