"""The inputs of a vision model for sequences with pictures and videos, in rows or in one row.

Positions are those of the model's own `get_rope_index`, if it has one. The vision tower's states replace the picture
tokens of a prompt; a generated picture token is embedded like any other, and so is one for a video or sound.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import MODEL_MAPPING, PreTrainedModel

from verl.utils.pictures import Medium, PictureProcessor
from verl.utils.pictures.processing import OF_PICTURES, OF_VIDEOS, kind_of
from verl.workers.hf.packing import row_inputs

NAMES = {OF_PICTURES: "pictures", OF_VIDEOS: "videos"}
GRIDS = {OF_PICTURES: "image_grid_thw", OF_VIDEOS: "video_grid_thw"}


def vision_tower(model: PreTrainedModel) -> nn.Module:
    """The vision tower of a model, with all modules that transformers counts as part of it."""
    tower: nn.Module = model.get_encoder(modality="image")
    assert tower is not model  # which transformers returns of a model without one
    return tower


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The pictures and videos of some sequences, and what computes their patches."""

    processor: PictureProcessor
    pictures: Sequence[Sequence[Medium]]
    """Those of each sequence, in order."""
    with_videos: bool = False
    """Whether sequences of other ranks may have videos."""

    def of(self, model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Seen:
        """`input_ids` and `attention_mask` [sequences, columns], padding anywhere. Opens the pictures.

        Raises PictureError for one that cannot be opened, ValueError for a sequence with fewer tokens for pictures than
        its pictures have.
        """
        pictures = [picture for row in self.pictures for picture in row]
        once = _Once.of(model, pictures, self.processor)
        own = self.processor.inputs(pictures) if once is None else once.of_sequences()
        kinds = torch.zeros_like(input_ids, dtype=torch.int)
        for kind, token in self.processor.token_ids.items():
            each = [[picture for picture in row if kind_of(picture) == kind] for row in self.pictures]
            wanted = torch.tensor([sum(self.processor.counts(row)) for row in each], device=input_ids.device)
            is_token = (input_ids == token) & attention_mask.bool()
            here = is_token & (is_token.cumsum(1) <= wanted[:, None])
            if not torch.equal(here.sum(1), wanted):
                raise ValueError(f"{NAMES[kind]} become {wanted.tolist()} tokens, and there are {here.sum(1).tolist()}")
            kinds[here] = kind
        stands_in = kinds > 0
        given = {name: tensor.to(input_ids.device) for name, tensor in own.items()}
        plain = _without_media(model, input_ids, stands_in)
        positions, deltas = _placed(model, plain, attention_mask, kinds, given)
        inputs = {"input_ids": plain, "attention_mask": attention_mask, "position_ids": positions, **given}
        inputs |= dict.fromkeys(_names_of_kinds(model), kinds)
        return Seen(inputs=inputs, deltas=deltas, token_ids=input_ids, stands_in=stands_in, once=once)

    def require(self, token_ids: Sequence[int]) -> None:
        """Check one sequence: raises the errors of `of`."""
        for kind, own in self.processor.token_ids.items():
            wanted = sum(self.processor.counts([each for each in self.pictures[0] if kind_of(each) == kind]))
            found = sum(token == own for token in token_ids)
            if found < wanted:
                raise ValueError(f"{NAMES[kind]} become {wanted} tokens, and there are {found}")

    def with_blank(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[Sight, Any, Any]:
        """Add a row with a blank picture if there is none, and likewise a video `with_videos`: all ranks of a sharded
        model must call its tower together, once for each kind. The gradient of those rows is zero."""
        sight, ids, mask = self, input_ids, attention_mask
        found = {kind_of(picture) for row in self.pictures for picture in row}
        for kind in (OF_PICTURES, OF_VIDEOS) if self.with_videos else (OF_PICTURES,):
            if kind not in found:
                sight, ids, mask = sight._with_blank(kind, ids, mask)
        return sight, ids, mask

    def _with_blank(
        self, kind: int, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[Sight, torch.Tensor, torch.Tensor]:
        blank = self.processor.blank(kind)
        (count,) = self.processor.counts([blank])
        missing = max(count - input_ids.shape[1], 0)
        row = input_ids.new_full((1, input_ids.shape[1] + missing), self.processor.token_ids[kind])
        mask = (torch.arange(row.shape[1], device=row.device) < count).to(attention_mask.dtype)
        widened = (nn.functional.pad(each, (0, missing)) for each in (input_ids, attention_mask))
        ids, masks = (torch.cat([each, new]) for each, new in zip(widened, (row, mask[None]), strict=True))
        return replace(self, pictures=[*self.pictures, [blank]]), ids, masks


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
    orders: dict[int, list[int]]
    """By kind: which of them each picture of the sequences is."""

    @classmethod
    def of(cls, model: Any, pictures: Sequence[Medium], processor: PictureProcessor) -> _Once | None:
        """None where each is there once, and for other towers."""
        different = {each.key: each for each in pictures}
        find = getattr(model, "get_encoder", None)
        if len(different) == len(pictures) or find is None:
            return None
        tower = find(modality="image")
        if tower is model or "grid_thw" not in inspect.signature(tower.forward).parameters:
            return None
        orders = {}
        for kind in processor.token_ids:
            own = [picture.key for picture in pictures if kind_of(picture) == kind]
            places = {key: place for place, key in enumerate(dict.fromkeys(own))}
            if own:
                orders[kind] = [places[key] for key in own]
        return cls(tower=tower, inputs=processor.inputs(list(different.values())), orders=orders)

    def of_sequences(self) -> dict[str, torch.Tensor]:
        """What there is of each picture of the sequences, as its grid, and the patches of each once."""
        found = dict(self.inputs)
        for kind, order in self.orders.items():
            of_each = (GRIDS[kind], *((SECONDS,) if kind == OF_VIDEOS and SECONDS in found else ()))
            found |= {name: self.inputs[name][order] for name in of_each}
        return found

    def registered(self) -> list[Any]:
        """Hooks of the tower, while it is called with patches of `inputs` and the grids of all pictures: with those of
        pictures first, then with those of videos."""
        merged: Any = self.tower
        calls = itertools.cycle(sorted(self.orders))
        called = OF_PICTURES

        def narrow(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            nonlocal called
            called = next(calls)
            grids, given = self.inputs[GRIDS[called]], kwargs["grid_thw"]
            assert torch.equal(given.cpu(), grids[self.orders[called]].cpu())
            return args, kwargs | {"grid_thw": grids.to(given.device)}

        def widened(features: torch.Tensor) -> torch.Tensor:
            counts = self.inputs[GRIDS[called]].prod(-1) // merged.spatial_merge_size**2
            each = torch.split(features, counts.tolist())
            return torch.cat([each[place] for place in self.orders[called]])

        def widen(module: nn.Module, args: Any, output: Any) -> Any:
            output["pooler_output"] = widened(output["pooler_output"])
            if output.get("deepstack_features"):
                output["deepstack_features"] = [widened(features) for features in output["deepstack_features"]]
            return output

        return [
            self.tower.register_forward_pre_hook(narrow, with_kwargs=True),
            self.tower.register_forward_hook(widen),
        ]


SECONDS = "second_per_grid_ts"
"""Between two steps in time of a video, for Qwen2.5-VL."""


def _placed(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, kinds: torch.Tensor, given: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [3, sequences, columns] of a model whose pictures have a width and a height, else [sequences, columns];
    and the deltas, see `Seen`."""
    place = getattr(model.model, "get_rope_index", None)
    if place is None:
        positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        return positions, positions.new_zeros(len(positions), 1)
    seconds = {SECONDS: given[SECONDS].double()} if SECONDS in given else {}  # vLLM multiplies them as such
    positions, deltas = place(
        input_ids,
        mm_token_type_ids=kinds,
        image_grid_thw=given.get("image_grid_thw"),
        video_grid_thw=given.get("video_grid_thw"),
        attention_mask=attention_mask,
        **seconds,
    )
    return _after_videos(positions, deltas.reshape(-1, 1), attention_mask.bool(), kinds)


def _after_videos(
    positions: torch.Tensor, deltas: torch.Tensor, mask: torch.Tensor, kinds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and deltas where what follows a video begins behind its last one, as Qwen2-VL was trained and vLLM
    places it. transformers begins behind its width and height: within a video that goes on for longer."""
    if not (kinds == OF_VIDEOS).any():
        return positions, deltas
    positions, deltas = positions.clone(), deltas.clone()
    for row, (own, inside) in enumerate(zip(kinds, mask, strict=True)):
        columns, end = inside.nonzero()[:, 0], 0
        runs = itertools.groupby(columns.tolist(), key=own.tolist().__getitem__)
        for _, run in runs:
            here = torch.tensor(list(run), device=positions.device)
            begin = int(positions[:, row, here].min())
            if begin < end:
                positions[:, row, columns[columns >= here[0]]] += end - begin
            end = int(positions[:, row, here].max()) + 1
        deltas[row] = end - len(columns)
    return positions, deltas


def _names_of_kinds(model: Any) -> list[str]:
    """Arguments of `model` with 1 for each token of a picture, 2 for each of a video, else 0: some models let those of
    one picture see one another."""
    base: Any = MODEL_MAPPING[type(model.config)]
    accepted = inspect.signature(base.forward).parameters
    return [name for name in ("token_type_ids", "mm_token_type_ids") if name in accepted]
