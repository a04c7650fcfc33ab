"""Give SGLang pictures with the trainer's ids and patches: it reads both as they are, without its own processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.utils.pictures import Medium, PictureProcessor
from verl.utils.pictures.processing import OF_PICTURES, kind_of

AS_PROCESSED = "processor_output"
"""SGLang's name for inputs that a processor of transformers has made."""


def inputs_of(token_ids: Sequence[int], pictures: Sequence[Medium], processor: PictureProcessor) -> dict[str, Any]:
    """Open the pictures of a prompt and make SGLang's one item of `image_data`.

    `offsets` are the first and last token of each picture in `token_ids`. Further picture tokens were generated, and
    are embedded as text. Raises PictureError for a picture that cannot be opened, ValueError for a video, and for too
    few picture tokens.
    """
    if any(kind_of(picture) != OF_PICTURES for picture in pictures):
        raise ValueError("SGLang gets no videos from here: set actor_rollout_ref.rollout.name=hf")
    at = [place for place, each in enumerate(token_ids) if each == processor.token_id]
    sizes = [sum(processor.places(picture)) for picture in pictures]
    if len(at) < sum(sizes):
        raise ValueError(f"pictures become {sum(sizes)} tokens, and there are {len(at)}")
    offsets, used = [], 0
    for number, size in enumerate(sizes):
        first, last = at[used], at[used + size - 1]
        if last - first != size - 1:
            raise ValueError(f"the {size} tokens of picture {number} are not together, from token {first} to {last}")
        offsets.append((first, last))
        used += size
    return {"format": AS_PROCESSED, "offsets": offsets, **processor.inputs(pictures)}
