"""Pictures in prompts: their form between processes, and a model's inputs for them."""

from verl.utils.pictures.picture import Picture, PictureError, PixelLimits, is_turned, keep, pixel_limits, restored
from verl.utils.pictures.processing import PictureProcessor, load_processor

MULTI_MODAL_DATA = "multi_modal_data"
"""The key of a sample's pictures, in its item and in batches: {images: a list of `Picture`}."""
SEEN = "__seen__"
"""The key in batches of `PictureProcessor.digests` of what the engine saw."""

__all__ = [
    "MULTI_MODAL_DATA",
    "SEEN",
    "Picture",
    "PictureError",
    "PictureProcessor",
    "PixelLimits",
    "is_turned",
    "keep",
    "load_processor",
    "pixel_limits",
    "restored",
]
