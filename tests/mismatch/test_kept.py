"""What a run has kept of a step, and what is said if it has not."""

from __future__ import annotations

import json

import pytest

from verl.mismatch.command import main
from verl.mismatch.kept import kept_step
from verl.trainer.config.record import CONFIG_FILE
from verl.utils.config import ConfigError


@pytest.fixture
def run(tmp_path):
    model = tmp_path / "global_step_2" / "actor" / "huggingface"
    model.mkdir(parents=True)
    (tmp_path / "global_step_4.replaced").mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    (tmp_path / CONFIG_FILE).write_text(
        "actor_rollout_ref: {rollout: {name: sglang, temperature: 0.7, dtype: float16, exact: true}}\n"
    )
    (tmp_path / "samples").mkdir()
    return tmp_path


def sample(run, step, versions, **fields):
    row = {"step": step, "prompt_ids": [1, 2], "response_ids": [3] * len(versions), "versions": versions, **fields}
    with (run / "samples" / f"{step}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_tokens_are_those_that_the_weights_of_the_step_alone_generated(run):
    sample(run, 1, [2, 2])
    sample(run, 3, [1, 2, 2])
    sample(run, 3, [2, -1], log_probs=[-1.0, 0.0])
    sample(run, 3, [3])
    kept = kept_step(run, 2)
    assert kept.sequences == [([1, 2], [3, 3])]
    assert kept.log_probs == [[-1.0, None]]
    assert (kept.temperature, kept.dtype, kept.top_p, kept.top_k, kept.exact) == (0.7, "float16", 1.0, -1, True)
    assert kept.engine == "sglang"
    assert kept.model == run / "global_step_2" / "actor" / "huggingface"


def test_the_worst_sequence_comes_first_and_once_with_what_a_trainer_of_the_same_weights_said(run):
    sample(run, 3, [2])
    sample(run, 3, [2, 2])
    (run / "mismatch").mkdir()
    worst = {"prompt_ids": [1, 2], "response_ids": [3, 3], "versions": [2, 2], "trainer_log_probs": [-1.0, -2.0]}
    for step, version in ((4, 3), (3, 2)):
        row = json.dumps(worst | {"step": step, "trainer_version": version}) + "\n"
        (run / "mismatch" / f"{step}.jsonl").write_text(row)
    kept = kept_step(run, 2)
    assert kept.sequences == [([1, 2], [3, 3]), ([1, 2], [3])]
    assert kept.trainer_log_probs == [[-1.0, -2.0], None]
    (run / "mismatch" / "3.jsonl").unlink()
    assert kept_step(run, 2).trainer_log_probs == [None, None], "those of other weights say nothing"


def test_an_engine_of_another_kind_is_named_and_not_replaced_quietly(run, capsys):
    sample(run, 3, [2])
    config = (run / CONFIG_FILE).read_text()
    (run / CONFIG_FILE).write_text(config.replace("sglang", "hf"))
    assert main([str(run), "--step", "2"]) == 2
    assert "rollout.name=hf: name --engine vllm or sglang" in capsys.readouterr().err


def test_a_step_without_weights_says_which_there_are(run):
    with pytest.raises(ConfigError, match=r"checkpoints: 2\. .*hf_model"):
        kept_step(run, 1)


def test_a_step_without_samples_says_which_key_keeps_them(run):
    sample(run, 3, [1])
    with pytest.raises(ConfigError, match=r"trainer\.rollout_data_dir .* step 3"):
        kept_step(run, 2)


def test_a_run_without_its_configuration_is_refused(run):
    sample(run, 3, [2])
    (run / CONFIG_FILE).unlink()
    with pytest.raises(ConfigError, match="is not the configuration of a run"):
        kept_step(run, 2)


def test_a_directory_that_is_not_there_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="is no directory of a run"):
        kept_step(tmp_path / "run", 2)
