"""Name the cause of a difference between engine and trainer, from what both computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.activations import ACT2FN

from verl.mismatch.compare import Phase, Place
from verl.mismatch.places import ATTENTION, EMBEDDINGS, GATED, INPUT, LOG_PROBS, LOGITS, NORM, is_block
from verl.mismatch.recording import Recording, Sampling
from verl.mismatch.trainer import TrainersModel

ROTARY = "rotary_emb"
VERSIONS_APART = 0.01
"""The same program with the same weights gives probabilities that are nearer than this in the mean, in bfloat16."""
CLOSER = 4.0
"""An explanation is taken if it brings the trainer's values so many times closer to the engine's."""
CHANGED = 1e-3
"""Nats by which a score is another one; log-probs of float32 are off by a thousandth of it."""
SHAPES = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu with tanh", "silu": "silu", "relu": "relu"}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why engine and trainer differ."""

    name: str
    """One of the headings of docs/mismatch.md."""
    place: str
    text: str


def causes(
    found: Mapping[str, Phase],
    places: Sequence[Place],
    weights: Mapping[str, str],
    recording: Recording,
    sampling: Sampling,
    model: TrainersModel,
    wide: TrainersModel,
) -> list[Cause]:
    """All causes, the first of them in the order of computation first. `sampling`: what the trainer assumes."""
    decode = found["decode"]
    named = [*_inputs(decode), *_weights(weights)]
    beyond = [place for place in places if place.beyond]
    wrong = {place.name for place in beyond}
    beyond = [place for place in beyond if not _follows(place.name, wrong, decode.engine)]
    inner = [place for place in beyond if not any(other.name.startswith(f"{place.name}.") for other in beyond)]
    together: dict[tuple[str, str], list[Cause]] = {}
    for place in inner:
        phase = found[max(place.excess, key=lambda name: place.excess[name])]
        cause = _explained(place, phase, places, model, wide)
        together.setdefault((cause.name, place.name.rpartition(".")[2]), []).append(cause)
    for same in together.values():
        more = f", and {len(same) - 1} more of its kind" if len(same) > 1 else ""
        named.append(Cause(name=same[0].name, place=same[0].place, text=same[0].text + more))
    return [*named, *_sampled(recording, sampling)]


def _follows(name: str, wrong: set[str], shown: Mapping[str, torch.Tensor]) -> bool:
    """Whether another wrong place is what made this one wrong: nothing stands between a norm of queries and them, and
    only a gate between attention and what gets its outputs. What that gets is not `shown` where ranks divide it."""
    path, _, last = name.rpartition(".")
    if last == INPUT:
        return f"{path.rpartition('.')[0]}.{ATTENTION[3]}" in wrong
    if f">{name}" not in shown and f"{path}.{ATTENTION[3]}" in wrong and last not in ATTENTION and "norm" not in last:
        return True
    return last in ATTENTION[:2] and bool(wrong & {f"{path}.{last[0]}_norm", f"{path}.{last}_norm"})


def not_exact(places: Sequence[Place]) -> list[Cause]:
    """The first place that is not the same bits in both whole runs."""
    unequal = [place for place in places if place.unequal]
    return [
        Cause(name="not exact", place=place.name, text=f"{place.unequal:.1%} of the elements are other bits")
        for place in unequal[:1]
    ]


def another_version(
    recording: Recording, kept: Sequence[Sequence[float | None] | None], *, exact: bool = False
) -> list[Cause]:
    """Whether log-probs of the responses that an engine gave before are others than those of the files' weights.

    With `exact` one bit suffices; otherwise the mean difference of probabilities must be beyond rounding."""
    pairs = [
        (log_prob, float(scores[LOG_PROBS][index][tokens[index]]))
        for tokens, prompt, scores, before in zip(
            recording.tokens, recording.prompts, recording.scores, kept or [None] * len(recording.tokens), strict=True
        )
        for index, log_prob in enumerate(before or (), prompt)
        if log_prob is not None and index in scores.get(LOG_PROBS, {})
    ]
    others = sum(before != now for before, now in pairs)
    mean = sum(abs(math.exp(before) - math.exp(now)) for before, now in pairs) / max(len(pairs), 1)
    if not (others if exact else mean > VERSIONS_APART):
        return []
    text = (
        f"the run's engine gave {others} of {len(pairs)} tokens other probabilities than an engine with the "
        f"checkpoint's weights, by {mean:.2g} in the mean: it had another version, or other settings"
    )
    return [Cause(name="another version", place=LOG_PROBS, text=text)]


def _inputs(decode: Phase) -> Iterator[Cause]:
    if wrong := int((decode.ids != decode.expected).sum()):
        text = f"{wrong} of {len(decode.ids)} tokens that the engine's model got are not those of the trainer"
        yield Cause(name="other tokens", place="input_ids", text=text)
    shift = decode.positions - torch.tensor([index for _, index in decode.rows])
    if wrong := int((shift != 0).sum()):
        by = f", all by {int(shift[0]):+d}" if bool((shift == shift[0]).all()) else ""
        text = f"{wrong} of {len(shift)} positions in the engine are not those of the trainer{by}"
        yield Cause(name="other positions", place="positions", text=text)


def _weights(different: Mapping[str, str]) -> Iterator[Cause]:
    tables = [name for name in different if ROTARY in name]
    if tables and len(tables) == len(different):
        yield Cause(
            name="rope", place=tables[0], text="the engine's table of angles is not what a fresh model of it has"
        )
    elif different:
        name, text = next(iter(different.items()))
        more = f", and {len(different) - 1} more tensors" if len(different) > 1 else ""
        yield Cause(name="weights", place=name, text=f"{text}, compared with the engine's own load from disk{more}")


def _explained(place: Place, phase: Phase, places: Sequence[Place], model: TrainersModel, wide: TrainersModel) -> Cause:
    name, (path, _, last) = place.name, place.name.rpartition(".")
    engine, expected = phase.engine[name].double(), phase.wide[name].double()
    if name == EMBEDDINGS:
        return Cause(name="embeddings", place=name, text=_scaled(engine, expected) or "are other values")
    if name == LOGITS:
        return _scores(engine, expected, phase, model)
    if last == GATED:
        return _activated(path, name, engine, expected, phase, wide)
    if last in ATTENTION[:2]:
        return _rotated(place, path, phase, places)
    if last == ATTENTION[2]:
        return Cause(name="projection", place=name, text=_scaled(engine, expected) or "the projection differs")
    if last == ATTENTION[3]:
        return _attended(place, path, phase, model)
    if last == INPUT:
        return _entered(name, path.rpartition(".")[2], engine, expected)
    if name == NORM or "norm" in last:
        return Cause(name="norm", place=name, text=_normed(engine, expected))
    if is_block(name):
        return Cause(name="residual", place=name, text=_scaled(engine, expected) or "what is added differs")
    if last in ("gate", "router"):
        return _routed(place, phase, model)
    if hasattr(wide.module(name), "experts"):
        return _mixed(name, engine, expected, phase, wide)
    return Cause(name="projection", place=name, text=_scaled(engine, expected) or "the linear layer differs")


def _entered(name: str, module: str, engine: torch.Tensor, expected: torch.Tensor) -> Cause:
    """What the module of this name, inside attention, gets."""
    projected = "norm" in module and module[0] in "qk"  # a norm of queries, keys, or what both are made of
    text = _scaled(engine, expected) or f"what {module} gets is computed differently"
    return Cause(name="projection" if projected else "attention", place=name, text=text)


def _closer(engine: torch.Tensor, expected: torch.Tensor, candidate: torch.Tensor) -> bool:
    return bool((engine - candidate).norm() * CLOSER < (engine - expected).norm())


def _scaled(engine: torch.Tensor, expected: torch.Tensor) -> str:
    factor = float((engine * expected).sum() / (expected * expected).sum().clamp_min(1e-30))
    return f"the engine's is {factor:.4g} times the trainer's" if _closer(engine, expected, expected * factor) else ""


def _normed(engine: torch.Tensor, expected: torch.Tensor) -> str:
    whole = expected.abs() > 0.1 * expected.abs().amax(0, keepdim=True)
    ratios = torch.where(whole, engine / torch.where(whole, expected, torch.ones_like(expected)), torch.nan)
    channels = ratios.nanmedian(0, keepdim=True).values.nan_to_num(1.0)
    tokens = ratios.nanmedian(1, keepdim=True).values.nan_to_num(1.0)
    if _closer(engine, expected, expected * channels):
        wrong = ((channels - 1).abs() > 0.02).flatten().nonzero().flatten().tolist()
        if wrong and len(wrong) == channels.shape[1]:
            return f"the scale differs: {float(channels.median()):.4g} times the trainer's in all channels"
        return f"the scale differs in channel {wrong[0]}, of {len(wrong)}" if wrong else "the scale differs"
    if _closer(engine, expected, expected * tokens):
        return "tokens are normalized by another size: epsilon, or what the size is of"
    return "the norm differs"


def _rotated(place: Place, path: str, phase: Phase, places: Sequence[Place]) -> Cause:
    """Queries and keys come from a projection, perhaps a norm, and RoPE, which turns pairs of elements."""
    beyond = {each.name for each in places if each.beyond}
    if f"{path}.{ATTENTION[2]}" in beyond:
        return Cause(name="projection", place=place.name, text="queries, keys and values differ before attention")
    engine, expected = (_pairs(values[place.name], path, phase) for values in (phase.engine, phase.wide))
    sizes = (engine.abs() - expected.abs()).norm() / expected.abs().norm()
    if sizes > 0.5 * (engine - expected).norm() / expected.norm():
        return Cause(name="projection", place=place.name, text="queries or keys differ in size: projection, bias, norm")
    turned = (engine * expected.conj()).sum(1).angle()  # [tokens, pairs]
    mean = torch.polar(torch.ones_like(turned), turned).mean(0)
    if bool((mean.abs() > 0.98).all()):
        shift = round(float(mean[0].angle()), 1)
        return Cause(
            name="other positions", place=place.name, text=f"RoPE turns all tokens by the same: positions {shift:+.2g}"
        )
    if _closer(engine, expected, expected.conj()):
        return Cause(name="rope", place=place.name, text="RoPE turns the other way")
    return Cause(name="rope", place=place.name, text="RoPE turns by other angles: its base, scaling or size differ")


def _pairs(values: torch.Tensor, path: str, phase: Phase) -> torch.Tensor:
    """[tokens, heads, pairs] as complex numbers. Halves of a head are paired, as in transformers."""
    heads = values.double().reshape(len(values), -1, phase.head_dim)
    first, second = heads.chunk(2, dim=-1)
    return torch.complex(first, second)


def _attended(place: Place, path: str, phase: Phase, model: TrainersModel) -> Cause:
    decode, prefill = (place.excess.get(name, 0.0) for name in ("decode", "prefill"))
    options = model.options.get(path, {})
    engine, expected = phase.engine[place.name].double(), phase.wide[place.name].double()
    scale = float(options.get("scaling") or phase.head_dim**-0.5)
    ways: dict[str, dict[str, Any]] = {}
    if options.get("softcap"):
        ways["scores are not capped in the engine"] = {"softcap": None}
    if options.get("sliding_window"):
        window = int(options["sliding_window"])
        ways["the window is missing in the engine"] = {"sliding_window": None}
        ways |= {f"the engine's window is {window + by}": {"sliding_window": window + by} for by in (-1, 1)}
    for factor in (phase.head_dim**-0.5 / scale, *(2.0 ** (each / 4) for each in range(-16, 17) if each)):
        ways[f"scores are scaled by {scale * factor:.4g}, not by {scale:.4g}"] = {"scaling": scale * factor}
    best, text = float((engine - expected).norm()) / CLOSER, ""
    for words, change in ways.items():
        candidate = _attention(path, phase, {**options, "scaling": scale, **change})
        if (error := float((engine - candidate).norm())) < best:
            best, text = error, words
    if text:
        return Cause(name="attention", place=place.name, text=text)
    other = ("decode", "prefill") if decode > prefill else ("prefill", "decode")
    if min(decode, prefill) * CLOSER < max(decode, prefill):
        return Cause(name="attention", place=place.name, text=f"differs in {other[0]}, and not in {other[1]}")
    return Cause(name="attention", place=place.name, text="from the same queries, keys and values comes something else")


def _attention(path: str, phase: Phase, options: Mapping[str, Any]) -> torch.Tensor:
    """Causal attention from the engine's queries, keys and values in float64: [tokens, heads * d]."""
    query, key, value = (phase.engine[f"{path}.{name}"].double() for name in ATTENTION[:3])
    outputs = []
    sequences = torch.tensor([sequence for sequence, _ in phase.rows])
    for sequence in sorted(set(sequences.tolist())):
        own = sequences == sequence
        q, k, v = (
            each[own].reshape(int(own.sum()), -1, phase.head_dim).transpose(0, 1) for each in (query, key, value)
        )
        k, v = (each.repeat_interleave(len(q) // len(each), dim=0) for each in (k, v))
        scores = q @ k.transpose(1, 2) * options["scaling"]
        if cap := options.get("softcap"):
            scores = cap * torch.tanh(scores / cap)
        places = torch.arange(scores.shape[-1])
        seen = places[None] <= places[:, None]
        if window := options.get("sliding_window"):
            seen &= places[None] > places[:, None] - window
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        outputs.append((weights @ v).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def _narrowed(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """`tensor` as it is in narrower formats."""
    for dtype in (torch.bfloat16, torch.float16):
        yield str(dtype).removeprefix("torch."), tensor.to(dtype).double()
    for text, size in (("", tensor.abs().max()), (" with a scale for each row", tensor.abs().amax(-1, keepdim=True))):
        scale = size.double().clamp_min(1e-30) / 448
        yield f"float8{text}", (tensor.double() / scale).to(torch.float8_e4m3fn).double() * scale
    yield "float8 without a scale", tensor.to(torch.float8_e4m3fn).double()


def _precision(engine: torch.Tensor, expected: torch.Tensor, inputs: torch.Tensor, layer: Any) -> str:
    """Which format of the weight, or of inputs and outputs, explains the engine's values; empty if none does."""
    weight, inputs = layer.weight.detach(), inputs.double()
    bias = getattr(layer, "bias", None)
    added = 0.0 if bias is None else bias.detach().double()
    rows = slice(0, engine.shape[1])
    best, text = float((engine - expected).norm()) / CLOSER, ""
    for words, narrow in _narrowed(weight):
        error = float((engine - inputs @ narrow[rows].T - added).norm())
        if error < best:
            best, text = error, f"the weight is computed with in {words}"
    if text:
        return text
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        if weight.dtype.itemsize > dtype.itemsize and torch.equal(engine, engine.to(dtype).double()):
            return f"the values are {str(dtype).removeprefix('torch.')}"
    return ""


def _scores(engine: torch.Tensor, expected: torch.Tensor, phase: Phase, model: TrainersModel) -> Cause:
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap and _closer(engine, expected, cap * torch.atanh((expected / cap).clamp(-1 + 1e-9, 1 - 1e-9))):
        return Cause(name="head", place=LOGITS, text=f"scores are not capped at {cap} in the engine")
    if text := _scaled(engine, expected):
        return Cause(name="head", place=LOGITS, text=text)
    if model.head is not None and NORM in phase.engine:
        inputs = phase.engine[NORM][phase.predicting]
        if text := _precision(engine, expected, inputs, model.head):
            return Cause(name="precision of the head", place=LOGITS, text=text)
    return Cause(name="head", place=LOGITS, text="scores differ")


def _routed(place: Place, phase: Phase, model: TrainersModel) -> Cause:
    engine, expected = phase.engine[place.name].double(), phase.wide[place.name].double()
    if text := _scaled(engine, expected):
        return Cause(name="router", place=place.name, text=text)
    inputs = phase.engine.get(f">{place.name}")
    if inputs is not None and (text := _precision(engine, expected, inputs, model.module(place.name))):
        return Cause(name="precision of the router", place=place.name, text=text)
    return Cause(name="router", place=place.name, text="scores of experts differ")


def _mixed(name: str, engine: torch.Tensor, expected: torch.Tensor, phase: Phase, wide: TrainersModel) -> Cause:
    """Experts: two of them in each other's place, or weights that are not made to sum to 1."""
    block: Any = wide.module(name)
    inputs = phase.engine[f">{name}"].to(wide.dtype)
    unknown = Cause(name="experts", place=name, text=_scaled(engine, expected) or "experts, or their weights")
    with torch.no_grad():
        routes: Any = block.gate(inputs) if hasattr(block, "gate") else ()
        if len(routes) != 3:
            return unknown
        _, weights, chosen = routes
        count = int(getattr(block.gate, "num_experts", 0) or chosen.max() + 1)
        ones = torch.ones(len(inputs), 1, dtype=wide.dtype)
        each = torch.stack([block.experts(inputs, torch.full_like(chosen[:, :1], n), ones) for n in range(count)])
    rows = torch.arange(len(inputs))[:, None]

    def mixture(order: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = (each[order[chosen], rows].double() * weights.double()[..., None]).sum(1)
        return summed

    best, text = float((engine - expected).norm()) / CLOSER, ""
    for one, other in itertools.combinations(range(min(count, 64)), 2):
        order = torch.arange(count)
        order[[one, other]] = order[[other, one]]
        if (error := float((engine - mixture(order)).norm())) < best:
            best, text = error, f"experts {one} and {other} have each other's place"
    return Cause(name="experts", place=name, text=text) if text else unknown


def _activated(
    path: str, name: str, engine: torch.Tensor, expected: torch.Tensor, phase: Phase, wide: TrainersModel
) -> Cause:
    module: Any = wide.module(path)
    inputs = phase.engine.get(f">{path}")
    if inputs is not None and hasattr(module, "gate_proj") and hasattr(module, "up_proj"):
        states = inputs.to(wide.dtype)
        with torch.no_grad():
            gates, ups = module.gate_proj(states), module.up_proj(states)
            for key, words in SHAPES.items():
                if _closer(engine, expected, (ACT2FN[key](gates) * ups).double()):
                    return Cause(name="activation", place=name, text=f"the engine's activation is {words}")
    return Cause(name="projection", place=name, text=_scaled(engine, expected) or "gate, up or activation differ")


def _sampled(recording: Recording, sampling: Sampling) -> Iterator[Cause]:
    """What is between scores and log-probs: temperature, top-p, top-k, penalties, and whatever else changes scores."""
    slopes, kept, seen_only, others = [], [], [], list[tuple[float, int]]()
    for tokens, scores in zip(recording.tokens, recording.scores, strict=True):
        for index, log_probs in scores.get(LOG_PROBS, {}).items():
            logits = scores[LOGITS][index][: len(log_probs)].double()
            there = log_probs.isfinite()
            kept.append(int(there.sum()))
            seen = torch.zeros_like(there)
            seen[torch.tensor(tokens[:index])] = True
            x, y = logits[there & ~seen], log_probs.double()[there & ~seen]
            if len(x) < 3 or float(x.std()) == 0:
                continue
            slope = _slope(x, y)
            slopes.append(slope)
            off = (y - slope * x).median()
            rest = (log_probs.double() - slope * logits - off).abs()
            seen_only.append(_largest(rest[there & seen]))
            rest[~there | seen] = 0.0
            others.append((float(rest.max()), int(rest.argmax())))
    if kept and min(kept) < max(
        len(each) for scores in recording.scores for each in scores.get(LOG_PROBS, {}).values()
    ):
        text = f"the engine samples from {min(kept)} to {max(kept)} tokens, the trainer scores over all of them"
        yield Cause(name="top-p or top-k", place=LOG_PROBS, text=text)
    if not slopes or sampling.temperature == 0:  # nothing to fit, as where few tokens are kept
        return
    most, token = max(others)
    if max(seen_only, default=0.0) > CHANGED + 10 * most:
        yield Cause(name="penalties", place=LOG_PROBS, text="scores of tokens that occurred before are changed")
    elif most > CHANGED:
        text = f"scores are changed behind the head, that of token {token} by {most:.2g} more than others"
        yield Cause(name="scores before sampling", place=LOG_PROBS, text=text)
    if (slope := sorted(slopes)[len(slopes) // 2]) > 0 and abs(1 / slope / sampling.temperature - 1) > 1e-3:
        twice = abs(1 / slope / sampling.temperature**2 - 1) < 1e-3
        text = f"the engine divides scores by {1 / slope:.4g}, the trainer by {sampling.temperature:.4g}"
        yield Cause(name="temperature", place=LOG_PROBS, text=text + (": it is applied twice" if twice else ""))


def _slope(x: torch.Tensor, y: torch.Tensor) -> float:
    """Of the line through most of the points: the median over pairs that are half of all points apart (Theil and Sen's
    estimator, with as many pairs as points). Points off the line, a bias of some tokens, do not turn it."""
    order = x.argsort()
    x, y = x[order], y[order]
    half = (len(x) + 1) // 2
    runs, rises = x[half:] - x[:-half], y[half:] - y[:-half]
    return float((rises / runs.clamp_min(1e-30))[runs > 0].median())


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
