"""Make prompts with pictures for vLLM with the trainer's token ids and patches, without vLLM's own processor.

Ids already include the tokens of pictures. Patches come from the same function and the same file as the trainer's;
`ARRANGED` says under which names vLLM's models take them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import BatchFeature
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)

from verl.utils.pictures import Picture, PictureProcessor

MODALITY = "image"
Tensors = dict[str, torch.Tensor]


def prompt_with(token_ids: Sequence[int], pictures: Sequence[Picture], processor: PictureProcessor) -> MultiModalInput:
    """Open the pictures and make the prompt. Further picture tokens were generated, and are embedded as text.

    Raises PictureError for a picture that cannot be opened, ValueError for too few picture tokens.
    """
    ids = list(token_ids)
    items = [_item(processor, picture) for picture in pictures]
    patterns = [processor.places(picture) for picture in pictures]
    at = [place for place, token in enumerate(ids) if token == processor.token_id]
    wanted, used = sum(map(sum, patterns)), 0
    if len(at) < wanted:
        raise ValueError(f"pictures become {wanted} tokens, and there are {len(at)}")
    places = []
    for pattern in patterns:
        first, last = at[used], at[used + sum(pattern) - 1]
        if pattern != tuple(token == processor.token_id for token in ids[first : last + 1]):
            raise ValueError(f"the {sum(pattern)} tokens of a picture are not together, from token {first} to {last}")
        places.append(PlaceholderRange(first, len(pattern), None if all(pattern) else torch.tensor(pattern)))
        used += sum(pattern)
    keys = [picture.key for picture in pictures]
    return mm_input(ids, MultiModalKwargsItems({MODALITY: items}), {MODALITY: keys}, {MODALITY: places})


def _item(processor: PictureProcessor, picture: Picture) -> MultiModalKwargsItem:
    """Of one picture: what vLLM joins along the first dimension, which counts patches or tiles, and what it stacks."""
    joined, stacked = ARRANGED[processor.model_type](processor.inputs([picture]))
    if processor.model_type == "internvl":
        stacked = stacked | {"image_token_id": torch.tensor([processor.token_id])}
    fields = {
        name: MultiModalFieldConfig.flat_from_sizes(MODALITY, torch.tensor([len(tensor)]))
        for name, tensor in joined.items()
    } | {name: MultiModalFieldConfig.batched(MODALITY, keep_on_cpu=name in ON_HOST) for name in stacked}
    made = MultiModalKwargsItems.from_hf_inputs(BatchFeature(joined | stacked), fields)
    item: MultiModalKwargsItem = made[MODALITY][0]
    return item


def _by_grid(own: Tensors) -> tuple[Tensors, Tensors]:
    return {"pixel_values": own["pixel_values"]}, {"image_grid_thw": own["image_grid_thw"]}


def _of_one_size(own: Tensors) -> tuple[Tensors, Tensors]:
    """Its size is that of `pixel_values`, as nothing is filled up to the size of another picture."""
    return {}, {"pixel_values": own["pixel_values"]}


def _of_several_sizes(own: Tensors) -> tuple[Tensors, Tensors]:
    return {}, {"pixel_values": own["pixel_values"], "image_sizes": own["image_sizes"]}


def _in_tiles(own: Tensors) -> tuple[Tensors, Tensors]:
    return own, {"num_patches": torch.tensor([len(own["pixel_values"])])}


def _of_internvl(own: Tensors) -> tuple[Tensors, Tensors]:
    return own, {"image_num_patches": torch.tensor([len(own["pixel_values"])])}


def _of_smolvlm(own: Tensors) -> tuple[Tensors, Tensors]:
    return _in_tiles({name: own[name][0] for name in ("pixel_values", "pixel_attention_mask")})


def _with_places(own: Tensors) -> tuple[Tensors, Tensors]:
    return {}, {"pixel_values": own["pixel_values"], "pixel_position_ids": own["image_position_ids"]}


ON_HOST = ("image_grid_thw", "image_sizes", "num_patches", "image_num_patches", "image_token_id")
"""What vLLM's models read as numbers."""
ARRANGED: dict[str, Callable[[Tensors], tuple[Tensors, Tensors]]] = {
    "qwen2_vl": _by_grid,
    "qwen2_5_vl": _by_grid,
    "qwen3_vl": _by_grid,
    "qwen3_vl_moe": _by_grid,
    "qwen3_5": _by_grid,
    "qwen3_5_moe": _by_grid,
    "glm4v": _by_grid,
    "internvl": _of_internvl,
    "llava": _of_one_size,
    "mistral3": _of_one_size,
    "llava_next": _of_several_sizes,
    "gemma3": _in_tiles,
    "gemma4": _with_places,
    "smolvlm": _of_smolvlm,
}
"""By `model_type`: the names under which vLLM's model takes a picture's inputs by transformers. See `_item`."""
