"""Every kind of rotary embeddings in every architecture that has such: right, or refused by transformers or by name.

Sequences are decoded beside others, longer than what positions are made for, as the hf engine would; and computed in
rows and packed, as trainers would. Each is held against transformers' model that is new and has it alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.models.architectures import ARCHITECTURES, Architecture, build_random
from tests.models.configurations import ORIGINAL, WRAPPERS
from verl.utils.config import ConfigError
from verl.workers.hf.attention import attention_implementation
from verl.workers.hf.fit import require_fit
from verl.workers.hf.packing import attend_sequences_apart
from verl.workers.hf.probing import Way, find_way, in_rows, packed
from verl.workers.hf.regimes import Regimes
from verl.workers.rollout.hf.batch import DecodeBatch
from verl.workers.rollout.hf.decoding import find_decoding

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "mscale": 0.7, "mscale_all_dim": 1.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
    "longrope": {"factor": 6.0, "original_max_position_embeddings": ORIGINAL},
}
LENGTHS = (ORIGINAL + 9, 5, ORIGINAL)
PROMPTS = (3, ORIGINAL - 2, ORIGINAL + 3)
"""Tokens of prompts that are decoded together, until the first is longer than what positions are made for."""
STEPS = ORIGINAL
ALL = "every"


def ropes() -> Iterator[tuple[str, str, str]]:
    """(architecture, kind, kind of layers): of all layers alike, of one kind of layers, of every kind."""
    for architecture in ARCHITECTURES.values():
        found = getattr(architecture.make_config().get_text_config(), "rope_parameters", None)
        if architecture.model_type in WRAPPERS or not isinstance(found, dict):
            continue
        layers = [name for name, rope in found.items() if isinstance(rope, dict)]
        for kind in KINDS:
            for place in [*layers, ALL] if len(layers) > 1 else [ALL]:
                yield architecture.name, kind, place


def with_rope(architecture: Architecture, kind: str, place: str) -> PretrainedConfig:
    config = architecture.make_config()
    ropes = config.rope_parameters
    nested = {name: rope for name, rope in ropes.items() if isinstance(rope, dict)}
    changed = {
        name: rope if place not in (name, ALL) else _rope(config, kind, rope, f"{name}_inv_freq")
        for name, rope in nested.items()
    }
    fields = dict(architecture.config) | {"rope_parameters": changed or _rope(config, kind, ropes, "inv_freq")}
    if kind == "dynamic":
        fields["max_position_embeddings"] = ORIGINAL
    return type(config)(**fields)


def _rope(config: PretrainedConfig, kind: str, old: dict[str, Any], frequencies: str) -> dict[str, Any]:
    """`frequencies`: how the name of their buffer ends."""
    rope = {"rope_type": kind, "rope_theta": old.get("rope_theta") or 10000.0, **KINDS[kind]}
    if "partial_rotary_factor" in old:
        rope["partial_rotary_factor"] = old["partial_rotary_factor"]
    if kind == "longrope":
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        pairs = [buffer.shape[-1] for name, buffer in model.named_buffers() if name.endswith(frequencies)]
        num_pairs = pairs[0] if pairs else 16
        rope |= {"short_factor": [1.0] * num_pairs, "long_factor": [2.0 + pair for pair in range(num_pairs)]}
    return rope


def build(config: PretrainedConfig, implementation: str | None) -> Any:
    asked = {"attn_implementation": implementation} if implementation else {}
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, **asked)


def is_computed(original: Any) -> bool:
    """By transformers."""
    try:
        copy.deepcopy(original)(input_ids=torch.ones(1, max(LENGTHS), dtype=torch.int64), use_cache=False)
    except Exception:  # noqa: BLE001 - a class of models may raise anything about a configuration
        return False
    return True


def log_probs_alone(original: Any, ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary], by a new model."""
    return copy.deepcopy(original)(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


@pytest.mark.cells(16)
@pytest.mark.parametrize(("name", "kind", "place"), ropes())
@torch.no_grad()
def test_any_rotary_embeddings_are_computed_as_by_a_new_model_that_has_the_sequence_alone(name, kind, place):
    architecture = ARCHITECTURES[name]
    try:
        config = with_rope(architecture, kind, place)
    except Exception:  # noqa: BLE001 - transformers has no such configuration, and says so in any way
        return
    asked = attention_implementation(config)
    found = find_way(config, build, asked, furthest=Way.PACKED)
    try:
        original, ours = build(config, "eager").eval(), build(config, asked).eval()
    except Exception:  # noqa: BLE001 - a class of models may raise anything about a configuration
        with pytest.raises(ConfigError, match=r"no model can be built of config\.json"):
            require_fit(config, {}, "model.path", remote=False)
        return
    weights = build_random(architecture, 0).state_dict()
    original.load_state_dict(weights)
    ours.load_state_dict(weights)
    if not is_computed(original):
        assert found.way is Way.NONE
        assert "cannot be computed as config.json, with overrides, says" in found.why
        return
    assert found.way is not Way.NONE, found.why
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 250, (length,), generator=generator) for length in LENGTHS]
    right = [log_probs_alone(original, ids.tolist()) for ids in sequences]
    regimes = Regimes(ours)
    if found.way is Way.PACKED:
        attend_sequences_apart(ours)
    groups: dict[Any, list[int]] = {}
    for index, ids in enumerate(sequences):
        groups.setdefault(index if found.way is Way.ALONE else regimes.of(len(ids)), []).append(index)
    for together in groups.values():
        for compute in (in_rows, packed) if found.way is Way.PACKED else (in_rows,):
            regimes.forget()
            logits = compute(ours, [sequences[index] for index in together])
            for index, values in zip(together, logits, strict=True):
                torch.testing.assert_close(values.log_softmax(-1), right[index], rtol=0, atol=1e-4)

    decoding = find_decoding(config, build, asked).decoding
    assert decoding is not None
    batch = DecodeBatch(ours, decoding=decoding)
    rows = [torch.randint(0, 250, (length,), generator=generator).tolist() for length in PROMPTS]
    for _ in range(STEPS):
        found_now = batch.next_logits(rows).log_softmax(-1)
        for row, values in zip(rows, found_now, strict=True):
            torch.testing.assert_close(values, log_probs_alone(original, row)[-1], rtol=0, atol=1e-4)
            row.append(int(values.argmax()))
