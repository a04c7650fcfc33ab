"""Tinker's own client, as PyPI has it, drives the server: with numbers of a plain loop, and its cookbook unmodified."""

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.tenants.test_training import PROMPT, adapter_of, batches, plain_loop
from tests.tenants.wire_client import NAME, Server
from verl.utils.builtin import make_tiny_model

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".venv/tinker"
needs_tinker = pytest.mark.skipif(not (PACKAGES / "tinker").is_dir(), reason="make tinker")
pytestmark = needs_tinker
HERE = Path(__file__).parent
PROGRAM, COOKBOOK, EXAMPLE = HERE / "tinker_program.py", HERE / "cookbook_program.py", ROOT / "examples/adapters.py"
DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


async def said(program, *arguments):
    """What a program of a user prints, in whose interpreter the client is."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(program),
        *map(str, arguments),
        env=os.environ | {"PYTHONPATH": str(PACKAGES), "TINKER_API_KEY": "tml-any", "HF_HUB_OFFLINE": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, error = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, error.decode()
    return out.decode()


async def test_a_program_of_tinkers_client_gets_the_numbers_of_a_plain_loop(model, tmp_path):
    steps = batches("cross_entropy")
    written = [[[tokens.tolist(), {key: each.tolist() for key, each in inputs.items()}] for tokens, inputs in data]
               for data in steps]  # fmt: skip
    (tmp_path / "steps.json").write_text(json.dumps(written))
    async with Server(model, tmp_path) as server:
        url = str(server.http.make_url(""))
        *example, told = (await said(PROGRAM, url, NAME, tmp_path / "steps.json", EXAMPLE)).splitlines()
        tokens = server.base.tokenizer.encode("12+7")
    told = json.loads(told)
    learned = [float(line.rpartition(" ")[2]) for line in example if line.startswith("step ")]
    assert learned == sorted(learned, reverse=True)
    assert learned[-1] < 0.9 * learned[0]
    assert (example[-2][:6], example[-1][-14:]) == ("12+12=", "/weights/state")
    plain, losses, logprobs = plain_loop(model, "cross_entropy", steps, seed=11)
    assert (told["capabilities"], told["rank"], told["tokens"]) == (NAME, 4, tokens)
    np.testing.assert_allclose(told["losses"], losses, rtol=1e-5)
    for found, wanted in zip(told["logprobs"], logprobs, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    exported = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), adapter_of(tmp_path, told["sampler"])
    )
    for samples, prompts in zip(told["samples"], told["prompts"], strict=True):
        assert samples == told["samples"][0]
        for tokens, logprobs in samples:
            for scored in (plain, exported):
                with torch.no_grad():
                    scores = scored(input_ids=torch.tensor([PROMPT + tokens])).logits[0].log_softmax(-1)
                wanted = [scores[index, token].item() for index, token in enumerate((PROMPT + tokens)[1:])]
                np.testing.assert_allclose(logprobs, wanted[3:], atol=1e-4)
                for prompt in prompts:
                    assert prompt[0] is None
                    np.testing.assert_allclose(prompt[1:], wanted[:3], atol=1e-4)
    assert told["custom"]["mine"] == 2.0
    assert told["restored"][0] != told["restored"][1]
    assert {told["state"], told["sampler"]} < set(told["listed"])
    assert told["sampler"] in told["left"]
    assert set(told["left"]) < set(told["listed"]) - {told["state"]}
    wanted = (
        "NotFoundError: .*base_model 'other/model' is not served; 'tiny' is",
        "BadRequestError: .*lora_config.rank=1000 is not from 1 to 64",
        "BadRequestError: .*loss_fn 'dro' is not served; these are: cross_entropy, importance_sampling, ppo",
        "RequestFailedError: .*optim_step is not done: forward_backward .* was refused: loss_fn 'dro'",
        "NotFoundError: .*there are no weights 'tinker://none/weights/x' of this key",
    )
    for found, message in zip(told["refused"], wanted, strict=True):
        assert re.search(message, found), found


@pytest.mark.cells(7)
async def test_the_loops_of_the_cookbook_run_as_they_are(model, tmp_path):
    async with Server(model, tmp_path / "adapters", names=[str(model)]) as server:
        await said(COOKBOOK, server.http.make_url(""), model, tmp_path)
    check_loops(tmp_path, tmp_path / "adapters", equal=1e-5)


def check_loops(folder, adapters, *, equal):
    """What the loops themselves have found: they learn, and sampled log-probs are `equal` to those of training."""
    steps, rollouts = (
        [json.loads(line) for line in (folder / loop / "metrics.jsonl").read_text().splitlines()]
        for loop in ("supervised", "rl")
    )
    assert [step["step"] for step in steps] == list(range(8))
    assert steps[-1]["train_mean_nll"] < steps[0]["train_mean_nll"]
    assert steps[-2]["test/nll"] < steps[0]["test/nll"]
    for step in rollouts[:2]:
        assert abs(step["optim/kl_sample_train_v1"]) < equal
        assert 6 <= step["tokens/sampled"] <= 24  # a token may be the end
    saved = [json.loads(line) for line in (folder / "supervised" / "checkpoints.jsonl").read_text().splitlines()]
    assert saved[-1]["name"] == "final"
    assert adapter_of(adapters, saved[-1]["sampler_path"]).is_dir()
