"""That faults in a real engine are named, and that an engine without one is not blamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.mismatch.models import FAMILIES, make
from tests.mismatch.seeded_process import EXACT
from tests.sglang_on_cpu import NEEDS_SGLANG, PROGRAM
from tests.warm_workers import written_by
from verl.workers.hf.exact import layer_that_differs

NAMED = {
    "stale_tensor": "weights",
    "norm_scale": "norm",
    "norm_channel": "norm",
    "norm_epsilon": "norm",
    "last_norm": "norm",
    "query_norm": "norm",
    "rope_base": "rope",
    "rope_stretched": "rope",
    "rope_positions": "other positions",
    "positions": "other positions",
    "tokens": "other tokens",
    "attention_scale": "attention",
    "missing_softcap": "attention",
    "decode_alone": "attention",
    "missing_last_softcap": "head",
    "head_scale": "head",
    "window": "attention",
    "values": "projection",
    "query_of_a_key": "projection",
    "output_projection": "projection",
    "activation": "activation",
    "multiplier": "projection",
    "embedding_scale": "embeddings",
    "temperature_twice": "temperature",
    "temperature_of_one": "temperature",
    "top_p": "top-p or top-k",
    "top_k": "top-p or top-k",
    "penalty": "penalties",
    "logit_bias": "scores before sampling",
    "swapped_experts": "experts",
}
"""The first cause that is named, by fault."""
SOUND = "nothing"
ONLY = {
    "query_norm": ("qwen3", "gemma3_text", "qwen3_moe"),
    "query_of_a_key": ("qwen3", "gemma3_text", "qwen3_moe"),
    "missing_softcap": ("gemma2",),
    "missing_last_softcap": ("gemma2",),
    "swapped_experts": ("qwen3_moe",),
}
"""Families that have the part; all others are had by all, but for these:"""
WITHOUT = {
    "activation": ("qwen3_moe",),
    "multiplier": ("qwen3_moe",),
}


@pytest.mark.vllm
@pytest.mark.cells(3)
@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_every_fault_is_named_and_a_sound_engine_is_not_blamed(family, tmp_path: Path, warm):
    model = make(tmp_path / "model", family)
    _named_rightly(_said(warm, "vllm", model, "bfloat16", SOUND, *NAMED, SOUND), family)


@pytest.mark.sglang
@NEEDS_SGLANG
def test_every_fault_in_sglang_is_named_and_a_sound_one_is_not_blamed(tmp_path: Path):
    model = make(tmp_path / "model", "qwen3_moe")
    command = [sys.executable, "-m", "tests.mismatch.seeded_process", "sglang", str(model), "bfloat16"]
    ended = subprocess.run([*command, SOUND, *NAMED, SOUND], env=os.environ | PROGRAM, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    _named_rightly(_faults(ended.stdout), "qwen3_moe")


def _named_rightly(lines, family):
    first = {line["fault"]: (line["causes"] or [[""]])[0][0] for line in lines if line["fault"] != SOUND}
    assert first == {fault: NAMED[fault] for fault in NAMED if _has(family, fault)}
    assert [line["causes"] for line in lines if line["fault"] == SOUND] == [[], []]  # also after all faults


@pytest.mark.vllm
@pytest.mark.cells(3)
def test_an_engine_in_exact_mode_differs_by_no_bit_until_it_has_a_fault(tmp_path: Path, warm):
    model = make(tmp_path / "model", "qwen2")
    if found := layer_that_differs(AutoConfig.from_pretrained(model)):
        pytest.skip(f"on this processor {found} in bfloat16")
    sound, faulty = _said(warm, "vllm", model, EXACT, SOUND, "norm_scale")
    assert (sound["causes"], sound["mean"]) == ([], 0.0)
    assert faulty["causes"][0][0] == "norm"


def _said(warm, *arguments):
    return _faults(written_by(warm, "tests.mismatch.seeded_process", *arguments))


def _faults(written):
    return [json.loads(line) for line in written.splitlines() if line.startswith('{"fault"')]


def _has(family: str, fault: str) -> bool:
    return family in ONLY.get(fault, FAMILIES) and family not in WITHOUT.get(fault, ())
