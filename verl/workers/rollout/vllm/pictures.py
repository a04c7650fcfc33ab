"""Make prompts with pictures for vLLM with the trainer's token ids and patches, without vLLM's own processor.

Ids already include the tokens of pictures. Patches come from the same function and the same file as the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import BatchFeature
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from verl.utils.pictures import Picture, PictureProcessor

MODALITY = "image"


def prompt_with(token_ids: Sequence[int], pictures: Sequence[Picture], processor: PictureProcessor) -> MultiModalInput:
    """Open the pictures and make the prompt. Further picture tokens were generated, and are embedded as text.

    Raises PictureError for a picture that cannot be opened, ValueError for too few picture tokens.
    """
    ids = list(token_ids)
    given = processor.inputs(pictures)
    counts = processor.counts(pictures)
    at = [place for place, token in enumerate(ids) if token == processor.token_id]
    if len(at) < sum(counts):
        raise ValueError(f"pictures become {sum(counts)} tokens, and there are {len(at)}")
    places, used = [], 0
    for count in counts:
        first, last = at[used], at[used + count - 1]
        if last - first != count - 1:
            raise ValueError(f"the {count} tokens of a picture are not together, from token {first} to {last}")
        places.append(PlaceholderRange(offset=first, length=count))
        used += count
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes(MODALITY, given["image_grid_thw"].prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched(MODALITY, keep_on_cpu=True),
    }
    items = MultiModalKwargsItems.from_hf_inputs(BatchFeature(given), fields)
    keys = [picture.key for picture in pictures]
    return mm_input(ids, items, {MODALITY: keys}, {MODALITY: places})
