"""Pictures in prompts: their form between processes, and a model's inputs for them."""

from verl.utils.pictures.picture import Picture, PictureError, keep
from verl.utils.pictures.processing import PictureProcessor, load_processor

MULTI_MODAL_DATA = "multi_modal_data"
"""The key of a sample's pictures, in its item and in batches: {images: a list of `Picture`}."""

__all__ = ["MULTI_MODAL_DATA", "Picture", "PictureError", "PictureProcessor", "keep", "load_processor"]
