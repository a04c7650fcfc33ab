"""Compare an engine's recording with a trainer's model, module by module.

A module is *beyond rounding* if the engine's output is farther from that of the same module in a wider dtype, with the
same inputs, than `BEYOND` times what the trainer's own is. No threshold depends on the model, the place, or the dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from verl.mismatch.places import EMBEDDINGS, IDS, INPUT, LOGITS, POSITIONS, is_block
from verl.mismatch.recording import Recording
from verl.mismatch.trainer import TrainersModel, kind_of, picks

BEYOND = 3.0
"""Times the error of the trainer's own rounding; correct kernels were at most 1.4 apart."""
Values = dict[str, torch.Tensor]
PHASES = ("decode", "prefill")


@dataclass(kw_only=True)
class Place:
    """The comparison of one place, over all sequences."""

    name: str
    excess: dict[str, float] = field(default_factory=dict)
    """By phase: how many times the trainer's error from the wider dtype the engine's is, with the same inputs."""
    relative: float = 0.0
    """The difference of both whole runs, in the norm of the trainer's values: what has grown up to here."""
    ulps: float = 0.0
    """The median difference of an element, in units of its last place in the model's dtype."""
    unequal: float = 0.0
    """The share of elements that are not the same bits."""

    @property
    def beyond(self) -> bool:
        return max(self.excess.values(), default=0.0) > BEYOND


@dataclass(kw_only=True)
class Phase:
    """One recording with what the trainer's model makes of it: the values of all sequences, one after the other."""

    engine: Values
    trainer: Values
    """Of the whole run."""
    same_inputs: Values
    """Of each module from what the engine's module got."""
    wide: Values
    """The same in the wider dtype."""
    rows: list[tuple[int, int]]
    """The sequence of each row, and the index of the token."""
    ids: torch.Tensor
    """The tokens and"""
    positions: torch.Tensor
    """the positions that the engine's model was called with."""
    predicting: list[int]
    """Rows whose scores were computed."""
    head_dim: int
    top_k: dict[str, int]
    """By the name of a router, how many experts it chooses."""
    expected: torch.Tensor
    """The tokens that it should have been called with."""


def phases(recordings: Mapping[str, Recording], model: TrainersModel, wide: TrainersModel) -> dict[str, Phase]:
    """Run the trainer's model and the wider one over all recordings."""
    return {name: _phase(recording, model, wide) for name, recording in recordings.items()}


def _phase(recording: Recording, model: TrainersModel, wide: TrainersModel) -> Phase:
    parts: list[tuple[Values, ...]] = []
    rows: list[tuple[int, int]] = []
    ids: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    expected: list[int] = []
    scored: list[int] = []
    for sequence, (tokens, states, scores) in enumerate(
        zip(recording.tokens, recording.states, recording.scores, strict=True)
    ):
        count = len(states[IDS])  # the last token was sampled, and not computed with
        own = model.run(tokens[:count])
        engine = picks({name: states[name] for name in states}, own)
        logits = scores.get(LOGITS, {})
        predicting = [index - 1 for index in sorted(logits) if index - 1 < count]

        def given(name: str, states: torch.Tensor, engine: Values = engine) -> torch.Tensor | None:
            if name == f">{LOGITS}":  # the head gets what the last norm returned
                name = "norm"
            found = engine.get(name)
            return found if found is not None and found.shape == states.shape else None

        forced, widened = model.run(tokens[:count], given), wide.run(tokens[:count], given)
        for values in (own, forced, widened):
            values[LOGITS] = values[LOGITS][predicting]
        engine.pop(LOGITS, None)
        if predicting:
            engine[LOGITS] = torch.stack([logits[index + 1] for index in predicting])[:, : own[LOGITS].shape[1]]
        parts.append((engine, own, forced, widened))
        scored += [len(rows) + index for index in predicting]
        rows += [(sequence, index) for index in range(count)]
        ids.append(states[IDS])
        positions.append(states[POSITIONS])
        expected += tokens[:count]
    engine, own, forced, widened = (_joined(each) for each in zip(*parts, strict=True))
    return Phase(
        engine=engine,
        trainer=own,
        same_inputs=forced,
        wide=widened,
        rows=rows,
        ids=torch.cat(ids).long(),
        positions=torch.cat(positions).long(),
        predicting=scored,
        head_dim=model.head_dim,
        top_k=model.top_k,
        expected=torch.tensor(expected),
    )


def _joined(parts: Sequence[Values]) -> Values:
    names = [name for name in parts[0] if all(name in each for each in parts)]
    return {name: torch.cat([each[name] for each in parts]) for name in names}


def compared(found: Mapping[str, Phase]) -> list[Place]:
    """Every place that both sides have, in the order in which the trainer computes them."""
    decode = found["decode"]
    names = [name for name in decode.trainer if not name.startswith(">") and name in decode.engine]
    places = []
    for name in names:
        place = Place(name=name)
        for phase, values in found.items():
            sides = [each.get(name) for each in (values.engine, values.same_inputs, values.wide)]
            if (rows := _routed_alike(name, values)) is not None:
                sides = [None if each is None else each[rows] for each in sides]
            engine, forced, wide = sides
            if engine is not None and forced is not None and wide is not None and engine.numel():
                place.excess[phase] = excess(engine, forced, wide)
        engine, trainer = decode.engine[name], decode.trainer[name]
        if engine.numel():
            place.relative, place.ulps, place.unequal = apart(engine, trainer)
        places.append(place)
    return places


FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Engines compute them together; what comes of them is compared."""


def not_compared(found: Mapping[str, Phase]) -> list[str]:
    """Kinds of places that the engine's model does not show, as `self_attn.query`.

    Raises LookupError if a whole block is among them: without blocks nothing would be known of the model.
    """
    decode = found["decode"]
    missing = [name for name in decode.trainer if not name.startswith(">") and name not in decode.engine]
    if blocks_missing := [name for name in missing if is_block(name)]:
        raise LookupError(f"the engine's model has no {blocks_missing[0]} with the shape of the trainer's")
    kinds = dict.fromkeys(kind_of(name).removeprefix("layers.") for name in missing)
    return [kind for kind in kinds if kind.rpartition(".")[2] not in (*FUSED, INPUT)]


def _routed_alike(name: str, values: Phase) -> torch.Tensor | None:
    """Rows whose experts are the same ones on all sides, for a place behind a router; None for other places.

    Where two experts have nearly the same score, rounding chooses, and the outputs are others.
    """
    routers = [router for router in values.top_k if router.startswith(f"{name}.") and router in values.engine]
    rows: torch.Tensor | None = None
    for router in routers:
        chosen = []
        for each in (values.engine, values.same_inputs, values.wide):
            scores = each[router].float()
            best = scores.topk(min(values.top_k[router] + 1, scores.shape[1])).values
            alike = best[:, -2] > best[:, -1] if best.shape[1] > values.top_k[router] else best[:, -1] == best[:, -1]
            rows = alike if rows is None else rows & alike
            chosen.append(scores.topk(values.top_k[router]).indices.sort().values)
        for other in chosen[1:]:
            rows &= (chosen[0] == other).all(-1)  # type: ignore[operator]
    return rows


def excess(engine: torch.Tensor, trainer: torch.Tensor, wide: torch.Tensor) -> float:
    """How many times the trainer's distance from `wide` the engine's is: of the worst token, or the worst channel.

    [tokens, width] each. An element that both have to round is off by half a unit in the last place at the least.
    """
    eps = torch.finfo(trainer.dtype).eps
    engine, trainer, wide = engine.double(), trainer.double(), wide.double()
    if not engine.isfinite().all():
        return float("inf")
    errors, own = (engine - wide).abs(), (trainer - wide).abs()
    sizes = wide.norm(dim=-1).clamp_min(1e-30)
    noise = (own.norm(dim=-1) / sizes).max().clamp_min(eps / 2)
    of_tokens = (errors.norm(dim=-1) / sizes / noise).max()
    largest = wide.abs().amax(0)
    floor = noise * sizes.max() / wide.shape[-1] ** 0.5
    of_channels = (errors.amax(0) / torch.maximum(own.amax(0), torch.maximum(largest * eps, floor))).max()
    return float(torch.maximum(of_tokens, of_channels))


def apart(engine: torch.Tensor, trainer: torch.Tensor) -> tuple[float, float, float]:
    """The difference relative to the norm, its median in units of the last place, and the share of unequal elements."""
    difference = (engine.double() - trainer.double()).abs()
    relative = float(difference.norm() / trainer.double().norm().clamp_min(1e-30))
    unit = torch.finfo(trainer.dtype).eps * 2.0 ** trainer.double().abs().clamp_min(1e-30).log2().floor()
    return relative, float((difference / unit).median()), float((difference > 0).double().mean())


def blocks(places: Sequence[Place]) -> list[Place]:
    """What is entered and left: the embeddings, every block, the last norm, and the scores."""
    return [place for place in places if is_block(place.name) or place.name in (EMBEDDINGS, "norm", LOGITS)]
