"""The inputs of a vision model for sequences with pictures, in rows or in one row.

Positions are those of the model's own `get_rope_index`, if it has one. The vision tower's states replace the picture
tokens of a prompt; a generated picture token is embedded like any other, and so is one for a video or sound.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import MODEL_MAPPING, PreTrainedModel

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
        pictures = [picture for row in self.pictures for picture in row]
        once = _Once.of(model, pictures, self.processor)
        own = self.processor.inputs(pictures) if once is None else once.of_sequences()
        wanted = torch.tensor([sum(self.processor.counts(row)) for row in self.pictures], device=input_ids.device)
        is_token = (input_ids == self.processor.token_id) & attention_mask.bool()
        stands_in = is_token & (is_token.cumsum(1) <= wanted[:, None])
        if not torch.equal(stands_in.sum(1), wanted):
            raise ValueError(f"pictures become {wanted.tolist()} tokens, and there are {stands_in.sum(1).tolist()}")
        given = {name: tensor.to(input_ids.device) for name, tensor in own.items()}
        plain = _without_media(model, input_ids, stands_in)
        kinds = stands_in.int()
        positions, deltas = _placed(model, plain, attention_mask, kinds, given)
        inputs = {"input_ids": plain, "attention_mask": attention_mask, "position_ids": positions, **given}
        inputs |= dict.fromkeys(_names_of_kinds(model), kinds)
        return Seen(inputs=inputs, deltas=deltas, token_ids=input_ids, stands_in=stands_in, once=once)

    def require(self, token_ids: Sequence[int]) -> None:
        """Check one sequence: raises the errors of `of`."""
        wanted = sum(self.processor.counts(self.pictures[0]))
        found = sum(token == self.processor.token_id for token in token_ids)
        if found < wanted:
            raise ValueError(f"pictures become {wanted} tokens, and there are {found}")

    def with_blank(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[Sight, Any, Any]:
        """Add a row with a blank picture if there is none: all ranks of a sharded model must call its tower together.
        The gradient of that row is zero."""
        if any(self.pictures):
            return self, input_ids, attention_mask
        blank = self.processor.blank()
        (count,) = self.processor.counts([blank])
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
    stands_in: torch.Tensor
    """[sequences, columns]: whether the tower's state is in the place of a token."""
    once: _Once | None = None

    def packed(self, model: nn.Module) -> Seen:
        """The sequences one after the other in one row, without padding."""
        inside = self.inputs["attention_mask"].bool()
        in_text = (inside.cumsum(1) - 1)[inside][None]
        positions = self.inputs["position_ids"]
        positions = in_text if positions.ndim == 2 else torch.cat([in_text[None], positions[:, inside][:, None]])
        row = row_inputs(model, self.inputs["input_ids"][inside][None], positions, inside.sum(1).tolist())
        kinds = {name: self.inputs[name][inside][None] for name in _names_of_kinds(model)}
        pictures = {name: self.inputs[name] for name in self.inputs.keys() - row.keys() - {"attention_mask"}}
        of_row = {name: getattr(self, name)[inside][None] for name in ("token_ids", "stands_in")}
        return replace(self, inputs=row | pictures | kinds, **of_row)

    @contextmanager
    def embedded(self, model: nn.Module) -> Iterator[None]:
        """In this block the model embeds `token_ids`, and its tower computes each picture once."""
        handles = _embedded(model, self.token_ids, self.stands_in)
        if self.once is not None:
            handles += self.once.registered()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def as_text(model: nn.Module, token_ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """The `input_ids` of a call without pictures. In this block the model embeds `token_ids`, also those that it would
    take for media without any: Gemma 4 embeds its padding in their place."""
    nothing = torch.zeros_like(token_ids, dtype=torch.bool)
    plain = _without_media(model, token_ids, nothing)
    if plain is token_ids:
        yield token_ids
        return
    handles = _embedded(model, token_ids, nothing)
    try:
        yield plain
    finally:
        for handle in handles:
            handle.remove()


def _without_media(model: Any, token_ids: torch.Tensor, but: torch.Tensor) -> torch.Tensor:
    """`token_ids` with a token of text in the place of the model's tokens for media, except where `but` is true.
    `token_ids` itself if there are none."""
    named = (getattr(model.config, f"{kind}_token_id", None) for kind in ("image", "video", "audio"))
    media = [token for token in named if token is not None]
    found = torch.isin(token_ids, torch.tensor(media, device=token_ids.device)) & ~but if media else None
    if found is None or not found.any():
        return token_ids
    text = next(token for token in range(len(media) + 1) if token not in media)
    return token_ids.masked_fill(found, text)


def _embedded(model: Any, token_ids: torch.Tensor, but: torch.Tensor) -> list[Any]:
    """Hooks with which the model embeds `token_ids`, and where `but` is true what it would embed without them. Gemma 4
    embeds tokens for each layer, too."""

    def written(module: nn.Module, args: Any) -> Any:
        return (torch.where(but, args[0], token_ids), *args[1:])

    of_layers = getattr(model.get_decoder(), "embed_tokens_per_layer", None)
    each = [model.get_input_embeddings(), *([of_layers] if of_layers is not None else [])]
    return [embeddings.register_forward_pre_hook(written) for embeddings in each]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Once:
    """Pictures that several sequences have, as responses to one prompt, for a tower that takes grids of patches."""

    tower: nn.Module
    inputs: dict[str, torch.Tensor]
    """Of each picture once."""
    order: list[int]
    """Which of them each picture of the sequences is."""

    @classmethod
    def of(cls, model: Any, pictures: Sequence[Picture], processor: PictureProcessor) -> _Once | None:
        """None where each is there once, and for other towers."""
        places = {picture.key: place for place, picture in enumerate({each.key: each for each in pictures}.values())}
        find = getattr(model, "get_encoder", None)
        if len(places) == len(pictures) or find is None:
            return None
        tower = find(modality="image")
        if tower is model or "grid_thw" not in inspect.signature(tower.forward).parameters:
            return None
        inputs = processor.inputs(list({each.key: each for each in pictures}.values()))
        return cls(tower=tower, inputs=inputs, order=[places[picture.key] for picture in pictures])

    def of_sequences(self) -> dict[str, torch.Tensor]:
        """The grids of all pictures of the sequences, and the patches of each once."""
        return self.inputs | {"image_grid_thw": self.inputs["image_grid_thw"][self.order]}

    def registered(self) -> list[Any]:
        """Hooks of the tower, while it is called with patches of `inputs` and the grids of all pictures."""
        grids = self.inputs["image_grid_thw"]
        merged: Any = self.tower
        counts = (grids.prod(-1) // merged.spatial_merge_size**2).tolist()

        def narrow(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, kwargs | {"grid_thw": grids.to(kwargs["grid_thw"].device)}

        def widened(features: torch.Tensor) -> torch.Tensor:
            each = torch.split(features, counts)
            return torch.cat([each[place] for place in self.order])

        def widen(module: nn.Module, args: Any, output: Any) -> Any:
            output["pooler_output"] = widened(output["pooler_output"])
            if output.get("deepstack_features"):
                output["deepstack_features"] = [widened(features) for features in output["deepstack_features"]]
            return output

        return [
            self.tower.register_forward_pre_hook(narrow, with_kwargs=True),
            self.tower.register_forward_hook(widen),
        ]


def _placed(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, kinds: torch.Tensor, given: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [3, sequences, columns] of a model whose pictures have a width and a height, else [sequences, columns];
    and the deltas, see `Seen`."""
    place = getattr(model.model, "get_rope_index", None)
    if place is None:
        positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        return positions, positions.new_zeros(len(positions), 1)
    positions, deltas = place(
        input_ids,
        mm_token_type_ids=kinds,
        image_grid_thw=given.get("image_grid_thw"),
        attention_mask=attention_mask,
    )
    return positions, deltas.reshape(-1, 1)


def _names_of_kinds(model: Any) -> list[str]:
    """Arguments of `model` with 1 for each token of a picture, else 0: some models let those see one another."""
    base: Any = MODEL_MAPPING[type(model.config)]
    accepted = inspect.signature(base.forward).parameters
    return [name for name in ("token_type_ids", "mm_token_type_ids") if name in accepted]
