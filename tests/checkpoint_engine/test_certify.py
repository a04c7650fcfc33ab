"""The command that tells whether a model reaches vLLM whole."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from tests.checkpoint_engine.check_process import FORGETFUL
from tests.checkpoint_engine.fakes import soon
from tests.processes import wait_until_gone
from tests.warm_workers import Fork, WarmWorkers, written_by
from verl.checkpoint_engine.certify import Certificate, Step, _changed, main, table
from verl.utils.builtin import make_tiny_model

PASSED = Certificate(
    model="DIR",
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    tensor_parallel_size=1,
    backend="naive",
    vllm="0",
    steps=[Step(before="dummy weights", seconds=1.0, tensors=3, different={}, tokens=8, wrong_tokens=[])],
)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Of one process; its path is short, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="certify-") as directory:
        yield Path(directory)


@pytest.mark.vllm
def test_a_model_that_vllm_serves_right_is_certified(tmp_path, temporary: Path, warm: WarmWorkers):
    model = make_tiny_model(tmp_path / "model", "qwen3_moe")
    answer = tmp_path / "answer.json"
    arguments = ["--model", model, "--dtype", "bfloat16", "--backend", "gloo", "--json", answer]
    written = written_by(warm, "verl.checkpoint_engine.certify", *arguments, spawns=True, TMPDIR=str(temporary))
    assert list(temporary.glob("vllm*")) == []
    found = json.loads(answer.read_text())
    assert found["passed"]
    assert [step["before"] for step in found["steps"]] == ["dummy weights", "the model's weights", "other weights"]
    assert all(step["tensors"] > 10 and step["tokens"] == 36 for step in found["steps"])
    assert all(step["different"] == {} and step["wrong_tokens"] == [] for step in found["steps"])
    assert "certified: the engine computes with what the files say" in written


STAGES = {
    "import": lambda temporary, _: any(temporary.glob("verl-certify-*/other")),
    "engine process": lambda temporary, _: any(temporary.glob("verl-engine-*/*-*-*")),
    "engine": lambda _, printed: "Initializing a V1 LLM engine" in printed,
    "weights": lambda temporary, _: any(temporary.glob("shm/verl-*/slot*")),
    "compare": lambda _, printed: "Loading safetensors checkpoint shards" in printed,
}
"""What shows that `certify` is there."""


@pytest.mark.vllm
@pytest.mark.parametrize("stopped", STAGES)
def test_sigterm_ends_it_at_every_stage_and_nothing_is_left(stopped, tmp_path, temporary: Path, warm: WarmWorkers):
    model, printed = make_tiny_model(tmp_path / "model", "llama"), tmp_path / "printed"
    (temporary / "shm").mkdir()
    with printed.open("w") as output:
        process = Fork(
            warm,
            "verl.checkpoint_engine.certify",
            ["--model", str(model)],
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "VERL_SHM_DIR": str(temporary / "shm")}
            | {"VLLM_LOGGING_LEVEL": "INFO"},
            stdout=output,
            stderr=output,
            spawns=True,
        )
    while not STAGES[stopped](temporary, printed.read_text()):
        assert process.poll() is None, printed.read_text()
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    if stopped in ("weights", "compare"):
        for child in children:  # the engine answers nothing any more
            with contextlib.suppress(psutil.NoSuchProcess):
                child.suspend()
    process.send_signal(signal.SIGTERM)
    assert process.end(printed) == 130, printed.read_text()
    assert "interrupted" in printed.read_text().splitlines()
    for child in children:  # trackers and janitors end by themselves
        with contextlib.suppress(psutil.NoSuchProcess):
            child.resume()
    assert wait_until_gone(children) == []
    # Janitors remove what is there meanwhile.
    assert soon(lambda: {name for _, *names in os.walk(temporary) for name in sum(names, [])} <= {"shm"})


@pytest.mark.vllm
def test_a_model_whose_loader_forgets_a_copy_is_not(tmp_path, warm: WarmWorkers):
    model = make_tiny_model(tmp_path / "model", "llama")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": [FORGETFUL]}))
    written = written_by(warm, "tests.checkpoint_engine.certify_process", "--model", model, code=1)
    assert "model.packed" in written
    assert written.rstrip().endswith("NOT certified")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"different": {"model.packed": "has values from before"}},
            "after dummy weights: model.packed has values from",
        ),
        ({"wrong_tokens": ["token 0 after 3: 7, Hugging Face: 9 (1.2 std ahead)"]}, "token 0 after 3: 7"),
    ],
)
def test_any_difference_fails_and_is_named(change, text):
    failed = replace(PASSED, steps=[replace(PASSED.steps[0], **change)])
    assert PASSED.passed
    assert not failed.passed
    assert text in table(failed)
    assert table(failed).endswith("NOT certified")
    assert not replace(PASSED, refusal="no").passed


def test_wrong_tokens_of_equal_tensors_are_vllms_own():
    wrong, different = {"wrong_tokens": ["token 0 after 3: 7"]}, {"different": {"model.packed": "differs"}}
    told = [table(replace(PASSED, steps=[replace(PASSED.steps[0], **change)])) for change in (wrong, wrong | different)]
    assert ["vLLM computes this model differently itself" in text for text in told] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--model", "{model}", "--backend", "glooo"], "glooo"),
        (["--model", "{model}", "--tensor-parallel-size", "0"], "must be 1 or more, not 0"),
    ],
)
def test_what_cannot_be_tried_is_one_line_and_exit_code_2(tmp_path, capsys, arguments, text):
    model = make_tiny_model(tmp_path / "model", "llama")
    assert main([argument.format(model=model) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert text in captured.err


@pytest.mark.parametrize("values", [torch.randn(3, 4), torch.ones(5), torch.tensor(2.0), torch.randn(4).bfloat16()])
def test_the_other_version_differs_in_every_tensor_and_has_its_shape_and_dtype(values):
    other = _changed(values)
    assert (other.shape, other.dtype) == (values.shape, values.dtype)
    assert not torch.equal(other, values)
