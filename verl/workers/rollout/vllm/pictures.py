"""Make prompts with pictures and videos for vLLM with the trainer's ids and patches, without vLLM's own processor.

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

from verl.utils.pictures import Medium, PictureProcessor
from verl.utils.pictures.processing import OF_PICTURES, OF_VIDEOS, kind_of

MODALITIES = {OF_PICTURES: "image", OF_VIDEOS: "video"}
WORDS = {OF_PICTURES: "picture", OF_VIDEOS: "video"}
BY_FRAMES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Of whose videos vLLM looks for the token that begins each frame, from the first of its tokens on."""
Tensors = dict[str, torch.Tensor]


def prompt_with(token_ids: Sequence[int], pictures: Sequence[Medium], processor: PictureProcessor) -> MultiModalInput:
    """Open the pictures and make the prompt. Further picture tokens were generated, and are embedded as text.

    Raises PictureError for a picture that cannot be opened, ValueError for too few picture tokens.
    """
    ids = list(token_ids)
    items: dict[str, list[MultiModalKwargsItem]] = {}
    keys: dict[str, list[str]] = {}
    places: dict[str, list[PlaceholderRange]] = {}
    for kind, modality in MODALITIES.items():
        if own := [picture for picture in pictures if kind_of(picture) == kind]:
            items[modality] = [_item(processor, picture) for picture in own]
            keys[modality] = [picture.key for picture in own]
            places[modality] = _places(ids, own, kind, processor)
    return mm_input(ids, MultiModalKwargsItems(items), keys, places)


def _places(ids: list[int], own: Sequence[Medium], kind: int, processor: PictureProcessor) -> list[PlaceholderRange]:
    """Of each picture, or of each video."""
    token = processor.token_ids[kind]
    patterns = [processor.places(picture) for picture in own]
    at = [place for place, each in enumerate(ids) if each == token]
    wanted, used = sum(map(sum, patterns)), 0
    if len(at) < wanted:
        raise ValueError(f"{WORDS[kind]}s become {wanted} tokens, and there are {len(at)}")
    places: list[PlaceholderRange] = []
    for pattern in patterns:
        first, last = at[used], at[used + sum(pattern) - 1]
        if pattern != tuple(each == token for each in ids[first : last + 1]):
            raise ValueError(
                f"the {sum(pattern)} tokens of {WORDS[kind]} {len(places)} are not together, from token {first} "
                f"to {last}"
            )
        if kind == OF_VIDEOS and processor.model_type in BY_FRAMES:
            first, pattern = first - 1, (False, *pattern)
        places.append(PlaceholderRange(first, len(pattern), None if all(pattern) else torch.tensor(pattern)))
        used += sum(pattern)
    return places


def _item(processor: PictureProcessor, picture: Medium) -> MultiModalKwargsItem:
    """Of one picture: what vLLM joins along the first dimension, which counts patches or tiles, and what it stacks."""
    kind = kind_of(picture)
    arranged = _by_grid_of_video if kind == OF_VIDEOS else ARRANGED[processor.model_type]
    joined, stacked = arranged(processor.inputs([picture]))
    if processor.model_type == "internvl":
        stacked = stacked | {"image_token_id": torch.tensor([processor.token_id])}
    fields = {
        name: MultiModalFieldConfig.flat_from_sizes(MODALITIES[kind], torch.tensor([len(tensor)]))
        for name, tensor in joined.items()
    } | {name: MultiModalFieldConfig.batched(MODALITIES[kind], keep_on_cpu=name in ON_HOST) for name in stacked}
    made = MultiModalKwargsItems.from_hf_inputs(BatchFeature(joined | stacked), fields)
    item: MultiModalKwargsItem = made[MODALITIES[kind]][0]
    return item


def _by_grid_of_video(own: Tensors) -> tuple[Tensors, Tensors]:
    """With what its positions are computed from."""
    patches = "pixel_values_videos"
    return {patches: own[patches]}, {name: own[name] for name in own if name != patches}


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


ON_HOST = (
    *("image_grid_thw", "video_grid_thw", "second_per_grid_ts"),
    *("image_sizes", "num_patches", "image_num_patches", "image_token_id"),
)
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
