"""A live vLLM model equals vLLM's own load from disk after a sync, and after a second one: both dtypes, one process.

Here are architectures of every kind; `python -m tests.models.vllm_process` takes any, and results/vllm.json holds what
it printed when it was run over more of them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.models.vllm_process import Outcome
from tests.warm_workers import Fork, WarmWorkers

pytestmark = pytest.mark.vllm

RUN = (
    "llama",
    "qwen3-tied",
    "gpt2",
    "phi",
    "gemma3_text",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "mamba",
    "qwen3_next",
    "minimax_m2",
    "doge",
    "dots1",
)
DTYPES = ("bfloat16", "float32")
HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
WHOLE = ("phi", "gpt_oss", *(["deepseek_v3"] if HAS_AMX else []))
"""vLLM's reload does not reach all of them, or fails, as that of latent attention for AMX: they are loaded as from
disk."""
KEPT_WIDE = {
    "llama": set(),
    "qwen3_moe": set(),
    "mamba": {"A_log"},
    "deepseek_v3": {"gate.e_score_correction_bias"},
    "dots1": {"gate.e_score_correction_bias"},
    "minimax_m2": {"block_sparse_moe.e_score_correction_bias", "gate.weight"},
}
"""How the names end of what vLLM keeps in float32 in a bfloat16 model."""
NOT_RUN = {
    "llama-base": "There is no module or parameter named 'embed_tokens'",
    "qwen3-mtp": "There is no module or parameter named 'mtp'",
    "mpt": "Model architecture MptForCausalLM was supported in vLLM until v0.28.0",
    "xglm": "Model architectures ['XGLMForCausalLM'] ",
    "afmoe": "'AfmoeConfig' object has no attribute 'score_func'",
    "dbrx": "blocks.0.ffn.experts.w13_weight",
    "glm4_moe_lite": "'Glm4MoeLiteConfig' object has no attribute 'first_k_dense_replace'",
    "longcat_flash": "'LongcatFlashConfig' object has no attribute 'mla_scale_q_lora'",
    "diffllama": "does not dispatch through the Transformers attention interface",
    "codegen": "Model architectures ['CodeGenForCausalLM'] ",
    "gpt_neo": "Model architectures ['GPTNeoForCausalLM'] ",
    "bamba": "does not dispatch through the Transformers attention interface",
    "minimax": "does not dispatch through the Transformers attention interface",
    "recurrent_gemma": "does not dispatch through the Transformers attention interface",
    "nemotron_h": "is_act_and_mul=False is supported only for CUDA, XPU and ROCm",
    "olmo_hybrid": "module 'triton' has no attribute 'set_allocator'",
    "kimi_linear": ("--mamba-block-size can only be set with --enable-prefix-caching", "No module named 'cutlass'"),
    "qwen3_5_text": "Model architectures ['Qwen3_5ForCausalLM'] failed to be inspected",
    "qwen3_5_moe_text": "Model architectures ['Qwen3_5MoeForCausalLM'] failed to be inspected",
}
"""What vLLM 0.32 on CPU does not load from disk, either, with its reason."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, warm: WarmWorkers) -> dict[tuple[str, str], Outcome]:
    """By architecture and dtype, as far as the process came."""
    directory = tmp_path_factory.mktemp("vllm")
    cells = [f"{name}:{dtype}" for name in RUN for dtype in DTYPES] + [f"{name}:bfloat16" for name in NOT_RUN]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    printed, errors = directory / "printed", directory / "errors"
    with printed.open("w") as output, errors.open("w") as log:
        arguments = [str(directory / "checkpoints"), *cells]
        process = Fork(warm, "tests.models.vllm_process", arguments, env=environment, stdout=output, stderr=log)
    code = process.end(printed, errors)
    lines = [json.loads(line) for line in printed.read_text().splitlines() if line.startswith("{")]
    found = {(line["architecture"], line["dtype"]): Outcome(**line) for line in lines}
    assert code == 0, f"after {list(found)}: {_end(errors)}"
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RUN)
def test_a_live_model_equals_its_load_from_disk_in_every_version(outcomes, name: str, dtype: str):
    outcome = outcomes[name, dtype]
    if HAS_AMX and (name, dtype) == ("deepseek_v3", "float32"):
        assert "expect weight to be bfloat16" in outcome.not_run  # vLLM's latent attention for AMX has no other
        return
    assert (outcome.not_run, outcome.refused, outcome.died, outcome.different) == (None, None, None, {})
    assert outcome.num_tensors > 10
    assert outcome.whole == (name in WHOLE)


@pytest.mark.parametrize("name", KEPT_WIDE)
def test_an_engine_names_the_tensors_that_it_keeps_in_float32(outcomes, name: str):
    names = outcomes[name, "bfloat16"].kept_wide
    assert {next((end for end in KEPT_WIDE[name] if one.endswith(end)), one) for one in names} == KEPT_WIDE[name]
    assert outcomes[name, "float32"].kept_wide == []


@pytest.mark.parametrize("name", NOT_RUN)
def test_what_vllm_does_not_load_from_disk_fails_for_the_reason_that_is_listed(outcomes, name: str):
    reasons = (NOT_RUN[name],) if isinstance(NOT_RUN[name], str) else NOT_RUN[name]  # some differ between processors
    found = outcomes[name, "bfloat16"].not_run or "nothing: delete its entry in NOT_RUN"
    assert any(reason in found for reason in reasons), found


def test_no_result_of_the_matrix_on_record_is_wrong():
    rows = json.loads((Path(__file__).parent / "results" / "vllm.json").read_text())
    assert [row for row in rows if row["different"] or row["refused"] or row["died"]] == []
    assert {row["architecture"] for row in rows if row["not_run"]} <= NOT_RUN.keys()


def _end(log: Path) -> str:
    return log.read_text()[-2000:]
