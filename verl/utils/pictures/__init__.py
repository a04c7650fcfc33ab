"""Pictures in prompts: what passes between processes, and what a model is given in its place."""

from verl.utils.pictures.picture import Picture, PictureError, keep
from verl.utils.pictures.processing import PictureProcessor, load_processor

MULTI_MODAL_DATA = "multi_modal_data"
"""The key of what a sample shows, in its item and in batches: {images: a list of `Picture`}."""

__all__ = ["MULTI_MODAL_DATA", "Picture", "PictureError", "PictureProcessor", "keep", "load_processor"]
