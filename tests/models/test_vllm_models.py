"""A live vLLM model equals vLLM's own load from disk after a sync, and after a second one, or vLLM does not load it.

Of all architectures in both dtypes, some every day. results/vllm.json is what a run of all of them found on one CPU;
scripts/models_page.py writes it, and docs/models.md of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.models.architectures import ARCHITECTURES
from tests.models.configurations import WRAPPERS
from tests.models.vllm_process import Outcome
from tests.pictures import HAS_TORCHVISION, with_torchvision
from tests.warm_workers import Fork, WarmWorkers

pytestmark = pytest.mark.vllm

DTYPES = ("bfloat16", "float32")
MOST_CELLS = 24
"""Of one process."""
HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
KEPT_WIDE = {
    "llama": set(),
    "mamba2": {"A_log"},
    "gemma3n_text": {"altup.correct_output_scale"},
    "qwen3_moe": set(),
    "mamba": {"A_log"},
    "deepseek_v3": {"gate.e_score_correction_bias"},
    "dots1": {"gate.e_score_correction_bias"},
    "minimax_m2": {"block_sparse_moe.e_score_correction_bias", "gate.weight"},
}
"""How the names end of what vLLM keeps in float32 in a bfloat16 model."""
REFUSED = {
    "laguna": (
        "1 parameters that are not among the weights: model.layers.1.mlp.experts.routed_experts.e_score_correction_bias"
        "; vLLM's loader of it leaves out model.layers.1.mlp.experts.e_score_correction_bias, also from disk"
    ),
}
"""What an engine would compute with something else than the checkpoint says, and why no version gets into it."""
AMX_IN_FLOAT32 = ("expect weight to be bfloat16",)
"""vLLM's latent attention for AMX has no other dtype."""
NOT_RUN = {
    "llama-base": ("There is no module or parameter named 'embed_tokens'",),
    "qwen3-mtp": ("There is no module or parameter named 'mtp'",),
    "mpt": ("Model architecture MptForCausalLM was supported in vLLM until v0.28.0",),
    "xglm": ("Model architectures ['XGLMForCausalLM'] ",),
    "afmoe": ("'AfmoeConfig' object has no attribute 'score_func'",),
    "dbrx": ("blocks.0.ffn.experts.w13_weight",),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), ("Sparse Attention is not supported on CPU",)),
    "hy_v4": ("no valid sparse MLA backend is available",),
    "glm4_moe_lite": ("'Glm4MoeLiteConfig' object has no attribute 'first_k_dense_replace'",),
    "longcat_flash": ("'LongcatFlashConfig' object has no attribute 'mla_scale_q_lora'",),
    "diffllama": ("does not dispatch through the Transformers attention interface",),
    "codegen": ("Model architectures ['CodeGenForCausalLM'] ",),
    "gpt_neo": ("Model architectures ['GPTNeoForCausalLM'] ",),
    "rwkv": ("Model architectures ['RwkvForCausalLM'] ",),
    "xlstm": ("Argument position_ids not found in the forward method of",),
    "bamba": ("does not dispatch through the Transformers attention interface",),
    "minimax": ("does not dispatch through the Transformers attention interface",),
    "recurrent_gemma": ("does not dispatch through the Transformers attention interface",),
    "nemotron_h": ("is_act_and_mul=False is supported only for CUDA, XPU and ROCm",),
    "olmo_hybrid": ("module 'triton' has no attribute 'set_allocator'",),
    "blt": ("'BltConfig' object has no attribute 'num_hidden_layers'",),
    "gpt_neox_japanese": ("Model architectures ['GPTNeoXJapaneseForCausalLM'] ",),
    "openai-gpt": ("Model architectures ['OpenAIGPTLMHeadModel'] ",),
    "trocr": ("Model architectures ['TrOCRForCausalLM'] ",),
    "modernbert-decoder": ("There is no module or parameter named 'decoder'",),
    "aria_text": ("AssertionError",),
    "axk1": ("Following weights were not initialized from checkpoint",),
    "hy_v3": ("first_k_dense_replace not exist",),
    "mimo_v2_flash": ("'MiMoV2FlashConfig' object has no attribute 'hybrid_layer_pattern'",),
    "deepseek_v4": ("The `mlp_layer_types` entries must be in ('sparse', 'dense')",),
    "zamba": ("does not dispatch through the Transformers attention interface",),
    "qwen4_exp_text": ("unsupported output_gate_type=None",),
    "inkling_text": ("'InklingTextConfig' object has no attribute 'padded_vocab_size'",),
    "kimi_linear": ("--mamba-block-size can only be set with --enable-prefix-caching", "No module named 'cutlass'"),
}
"""What vLLM 0.32 on CPU does not load from disk, either, with its reason."""
WITH_TORCHVISION = {*WRAPPERS, "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"}
"""Of whose code a part is about pictures."""


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, warm: WarmWorkers
) -> dict[tuple[str, str], Outcome]:
    """By architecture and dtype, of all cells that are tried today."""
    tried = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.function is test_a_live_model_equals_its_load_from_disk_in_every_version
    ]
    directory = tmp_path_factory.mktemp("vllm")
    found = {}
    for seeing in (False, True):
        left = [(cell["name"], cell["dtype"]) for cell in tried if (cell["name"] in WITH_TORCHVISION) == seeing]
        while left:
            batch, left = left[:MOST_CELLS], left[MOST_CELLS:]
            printed, said = _run(batch, directory, None if seeing else warm)
            found |= {(outcome.architecture, outcome.dtype): outcome for outcome in printed}
            if len(printed) < len(batch):
                name, dtype = batch[len(printed)]
                found[name, dtype] = Outcome(name, dtype, died=f"its process ended: {said}")
                left = [*batch[len(printed) + 1 :], *left]
    return found


def _run(cells: Sequence[tuple[str, str]], directory: Path, warm: WarmWorkers | None) -> tuple[list[Outcome], str]:
    """Of the cells up to one that ends the process, and the last that it said. What is not `warm` finds torchvision:
    transformers looks for it once, as it is imported."""
    settings = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    printed, errors = directory / "printed", directory / "errors"
    module, arguments = "tests.models.vllm_process", [str(directory / "checkpoints"), *map(":".join, cells)]
    with printed.open("w") as output, errors.open("w") as log:
        if warm is None:
            command = [sys.executable, "-m", module, *arguments]
            subprocess.run(command, env=with_torchvision() | settings, stdout=output, stderr=log, check=False)
        else:
            Fork(warm, module, arguments, env=os.environ | settings, stdout=output, stderr=log).end(printed, errors)
    lines = [json.loads(line) for line in printed.read_text().splitlines() if line.startswith("{")]
    return [Outcome(**line) for line in lines], errors.read_text()[-2000:]


@pytest.mark.cells(12)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_live_model_equals_its_load_from_disk_in_every_version(outcomes, record_property, name: str, dtype: str):
    outcome = outcomes[name, dtype]
    record_property("outcome", json.dumps(asdict(outcome)))
    if outcome.not_run:
        reasons = NOT_RUN.get(name, ())
        if name in WITH_TORCHVISION and not HAS_TORCHVISION:
            reasons = ("] failed to be inspected",)
        if HAS_AMX and dtype == "float32":
            reasons = (*reasons, *AMX_IN_FLOAT32)
        assert any(reason in outcome.not_run for reason in reasons), outcome.not_run
        return
    assert name not in NOT_RUN, "it is loaded from disk: delete its entry in NOT_RUN"
    assert (outcome.died, outcome.different) == (None, {})
    if name in REFUSED:
        assert REFUSED[name] in (outcome.refused or "")
        return
    assert outcome.refused is None
    assert outcome.num_tensors > 10
    if dtype == "float32":
        assert outcome.kept_wide == []
    elif name in KEPT_WIDE:
        found = {next((end for end in KEPT_WIDE[name] if one.endswith(end)), one) for one in outcome.kept_wide}
        assert found == KEPT_WIDE[name]


def test_no_result_on_record_is_wrong_and_every_cell_has_one():
    rows = json.loads((Path(__file__).parent / "results" / "vllm.json").read_text())["rows"]
    assert [row for row in rows if row["different"] or row["died"]] == []
    assert {row["architecture"] for row in rows if row["refused"]} == REFUSED.keys()
    assert {row["architecture"] for row in rows if row["not_run"]} <= NOT_RUN.keys()
    assert {(row["architecture"], row["dtype"]) for row in rows} == {(a, d) for a in ARCHITECTURES for d in DTYPES}
