"""The inputs of a vision model for sequences with pictures, in rows or in one row.

Positions are those of the model's own `get_rope_index`. The vision tower's states replace the picture tokens of a
prompt; a generated picture token is embedded like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.utils.pictures import Picture, PictureProcessor
from verl.workers.hf.packing import row_inputs


def vision_tower(model: PreTrainedModel) -> nn.Module:
    """The vision tower of a model, with all modules that transformers counts as part of it."""
    tower: nn.Module = model.get_encoder(modality="image")
    assert tower is not model  # which transformers returns of a model without one
    return tower


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The pictures of some sequences, and what computes their patches."""

    processor: PictureProcessor
    pictures: Sequence[Sequence[Picture]]
    """The pictures of each sequence, in order."""

    def of(self, model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Seen:
        """`input_ids` and `attention_mask` [sequences, columns], padding anywhere. Opens the pictures.

        Raises PictureError for one that cannot be opened, ValueError for a sequence with fewer tokens for pictures than
        its pictures have.
        """
        own = self.processor.inputs([picture for row in self.pictures for picture in row])
        wanted = self._wanted(own).to(input_ids.device)
        is_token = (input_ids == self.processor.token_id) & attention_mask.bool()
        stands_in = is_token & (is_token.cumsum(1) <= wanted[:, None])
        if not torch.equal(stands_in.sum(1), wanted):
            raise ValueError(f"pictures become {wanted.tolist()} tokens, and there are {stands_in.sum(1).tolist()}")
        given = {name: tensor.to(input_ids.device) for name, tensor in own.items()}
        plain = input_ids.masked_fill((input_ids == self.processor.token_id) & ~stands_in, self.processor.other_id)
        transformer: Any = model
        positions, deltas = transformer.model.get_rope_index(
            plain,
            mm_token_type_ids=stands_in.int(),
            image_grid_thw=given.get("image_grid_thw"),
            attention_mask=attention_mask,
        )
        inputs = {"input_ids": plain, "attention_mask": attention_mask, "position_ids": positions, **given}
        return Seen(inputs=inputs, deltas=deltas.reshape(-1, 1), token_ids=input_ids)

    def require(self, token_ids: Sequence[int]) -> None:
        """Check one sequence: raises the errors of `of`."""
        wanted = int(self._wanted(self.processor.inputs(self.pictures[0])))
        found = sum(token == self.processor.token_id for token in token_ids)
        if found < wanted:
            raise ValueError(f"pictures become {wanted} tokens, and there are {found}")

    def _wanted(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """[sequences]: how many tokens become of the pictures of each."""
        grids = inputs.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.long))
        sums = torch.cat([torch.zeros(1, dtype=torch.long), self.processor.counts(grids).cumsum(0)])
        ends = sums[torch.tensor([len(row) for row in self.pictures]).cumsum(0)]
        return ends.diff(prepend=ends.new_zeros(1))

    def with_blank(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[Sight, Any, Any]:
        """Add a row with a blank picture if there is none: all ranks of a sharded model must call its tower together.
        The gradient of that row is zero."""
        if any(self.pictures):
            return self, input_ids, attention_mask
        blank = self.processor.blank()
        count = int(self.processor.counts(self.processor.inputs([blank])["image_grid_thw"]))
        missing = max(count - input_ids.shape[1], 0)
        row = input_ids.new_full((1, input_ids.shape[1] + missing), self.processor.token_id)
        mask = (torch.arange(row.shape[1], device=row.device) < count).to(attention_mask.dtype)
        widened = (nn.functional.pad(each, (0, missing)) for each in (input_ids, attention_mask))
        ids, masks = (torch.cat([each, new]) for each, new in zip(widened, (row, mask[None]), strict=True))
        return Sight(processor=self.processor, pictures=[*self.pictures, [blank]]), ids, masks


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Sequences with their pictures."""

    inputs: dict[str, Any]
    """The inputs of the model, without options."""
    deltas: torch.Tensor
    """[sequences, 1]: how much the position of a next token differs from the number of tokens before it."""
    token_ids: torch.Tensor
    """[sequences, columns], of which `inputs` have another token in the place of generated ones for pictures."""

    def packed(self, model: nn.Module) -> Seen:
        """The sequences one after the other in one row, without padding."""
        inside = self.inputs["attention_mask"].bool()
        in_text = (inside.cumsum(1) - 1)[None]
        positions = torch.cat([in_text, self.inputs["position_ids"]])[:, inside][:, None]
        row = row_inputs(model, self.inputs["input_ids"][inside][None], positions, inside.sum(1).tolist())
        pictures = {name: self.inputs[name] for name in self.inputs.keys() - row.keys() - {"attention_mask"}}
        return replace(self, inputs=row | pictures, token_ids=self.token_ids[inside][None])

    @contextmanager
    def embedded(self, model: nn.Module) -> Iterator[None]:
        """In this block the model embeds `token_ids`."""
        transformer: Any = model
        embeddings = transformer.get_input_embeddings()
        handle = embeddings.register_forward_pre_hook(lambda module, args: (self.token_ids, *args[1:]))
        try:
            yield
        finally:
            handle.remove()
