"""`verl-sync diff` says where two runs first differ, and never that runs are equal which are not."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from tests.cli.runs import write_run, write_samples
from verl.checkpoint_engine.support import records
from verl.cli.main import cli
from verl.trainer.checkpoints import CheckpointDirectory, TrainerState
from verl.utils.measured import is_measured
from verl.workers.config.trainer import TrainerConfig

STATE = {
    "model.layers.0.weight": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    "optimizer.state.layers.0.weight.step": torch.tensor(3.0),
    "extra.rng.0.cpu": torch.arange(5, dtype=torch.uint8),
}


def diff(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["diff", *map(str, arguments)])


def first(a: Path, b: Path) -> dict[str, Any]:
    result = diff(a, b, "--json")
    assert result.exit_code == 1, result.output
    return json.loads(result.output)


def write_checkpoint(run: Path, step: int, state: dict[str, torch.Tensor]) -> None:
    directory = CheckpointDirectory(TrainerConfig(default_local_dir=str(run)))
    with directory.writing(TrainerState(step, {"epoch": 0, "position": step}, 0.1, {"x": 0.5})) as path:
        with warnings.catch_warnings(action="ignore"):  # that there is no process group
            dcp.save(state, checkpoint_id=path / "actor", no_dist=True)
        (path / "actor/huggingface").mkdir()
        exported = {name: value.clone() for name, value in state.items() if name.startswith("model.")}
        save_file(exported, path / "actor/huggingface/model.safetensors")
    directory.publish()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("whole") / "run")
    settings = {"trainer": {"seed": 1, "rollout_data_dir": str(run / "samples"), "default_local_dir": str(run)}}
    (run / "config.yaml").write_text(json.dumps(settings))
    for step in (1, 2, 3):
        write_samples(run / "samples", step)
    write_checkpoint(run, 3, STATE)
    return run


@pytest.fixture
def other(whole: Path, tmp_path: Path) -> Path:
    """A copy of the run, moved: its settings name a directory that is the first run's."""
    run = tmp_path / "other"
    shutil.copytree(whole, run)
    settings = json.loads((run / "config.yaml").read_text())
    settings["trainer"]["rollout_data_dir"] = str(run / "samples")
    (run / "config.yaml").write_text(json.dumps(settings))
    return run


def change_metric(run: Path, step: int, name: str, value: Any) -> None:
    found = records.read(run / "metrics.jsonl")[0]
    records.rewrite(run / "metrics.jsonl", [each | ({name: value} if each["step"] == step else {}) for each in found])


def change_sample(run: Path, step: int, number: int, **columns: Any) -> None:
    path = run / f"samples/{step}.jsonl"
    rows = records.read(path)[0]
    records.rewrite(path, [row | (columns if index == number else {}) for index, row in enumerate(rows)])


def test_equal_runs_end_with_0_and_say_what_was_looked_at(whole: Path, other: Path) -> None:
    result = diff(whole, other)
    assert result.exit_code == 0, result.output
    assert "equal: " in result.output
    assert "in 13 records, 9 samples, 4 values of 1 checkpoint" in result.output


def test_what_a_run_measures_of_its_machine_is_not_compared(whole: Path, other: Path) -> None:
    for name in ("timing_s/gen", "memory/driver/host_peak_gb", "perf/throughput", "checkpoint_engine/stage_s"):
        change_metric(other, 4, name, 77.0)
    change_sample(other, 2, 0, uid="another", replicas=[["replica-1", 0, 5]])
    assert diff(whole, other).exit_code == 0


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("timing_s/update_actor", True),
        ("perf/mfu/actor", True),
        ("perf/total_num_tokens", False),
        ("agent_loop/generate_s/mean", True),
        ("agent_loop/tool_calls/mean", False),
        ("agent_loop/retries", True),
        ("agent_loop/taken_over_tokens", True),
        ("training/attempt", True),
        ("training/global_step", False),
        ("val-core/a_s/acc/mean@1", False),
        ("reward_extra/wait_s/mean", False),
        ("recovery/step_s", True),
        ("rollout/prefill_again_tokens", True),
        ("actor/grad_norm", False),
    ],
)
def test_a_metric_is_one_of_the_machine_or_of_the_numbers(name: str, measured: bool) -> None:
    assert is_measured(name) is measured


def test_settings_that_differ_come_first_and_alone_make_no_difference(whole: Path, other: Path) -> None:
    settings = json.loads((other / "config.yaml").read_text())
    settings["trainer"] |= {"seed": 2, "save_freq": 3}
    (other / "config.yaml").write_text(json.dumps(settings))
    result = diff(whole, other)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[2] == "2 settings differ, A | B:"
    assert lines[3:5] == ["  trainer.save_freq  - | 3", "  trainer.seed  1 | 2"]


def test_the_first_step_with_another_metric_is_told(whole: Path, other: Path) -> None:
    change_metric(other, 5, "critic/score/mean", 0.5000000000000001)
    change_metric(other, 7, "actor/grad_norm", 3.0)
    found = first(whole, other)
    assert found["step"] == 5
    assert [(each["kind"], each["what"], each["a"], each["b"]) for each in found["differences"]] == [
        ("metrics", "critic/score/mean", 0.5, 0.5000000000000001)
    ]


def test_a_metric_that_one_run_lacks_is_a_difference_even_where_the_other_has_null(whole: Path, other: Path) -> None:
    change_metric(other, 2, "actor/new", None)
    assert first(whole, other)["differences"][0]["what"] == "actor/new"


def test_a_run_that_is_shorter_differs_where_it_ends(whole: Path, tmp_path: Path) -> None:
    shorter = write_run(tmp_path / "shorter", steps=4)
    found = first(whole, shorter)
    assert (found["step"], found["differences"][0]["what"]) == (5, "the step")


def test_the_first_token_that_differs_is_told_with_its_sample(whole: Path, other: Path) -> None:
    change_sample(other, 2, 1, response_ids=[5, 6, 8, 8, 9], score=0.0)
    change_metric(other, 3, "actor/grad_norm", 3.0)
    found = first(whole, other)
    (told,) = found["differences"]
    assert found["step"] == 2
    assert told["what"] == "training sample 1: response_ids"
    assert (told["uid"], told["place"], told["a"], told["b"]) == ("2-1", 2, 7, 8)
    assert "training sample 1: response_ids[2] (uid 2-1)  7 | 8" in diff(whole, other).output


@pytest.mark.parametrize(("change", "column"), [({"response_ids": [5, 6]}, "response_ids"), ({"score": 0.2}, "score")])
def test_shorter_responses_and_other_columns_differ_too(whole: Path, other: Path, change: Any, column: str) -> None:
    change_sample(other, 1, 2, **change)
    assert first(whole, other)["differences"][0]["what"] == f"training sample 2: {column}"


def test_samples_in_another_order_are_told_as_that(whole: Path, other: Path) -> None:
    path = other / "samples/3.jsonl"
    records.rewrite(path, records.read(path)[0][::-1])
    (told,) = first(whole, other)["differences"]
    assert (told["what"], told["a"], told["b"]) == ("order of training samples: uid", "3-0", "3-2")


@pytest.mark.parametrize("name", STATE)
def test_a_tensor_of_a_checkpoint_with_another_bit_is_named(whole: Path, other: Path, name: str) -> None:
    state = {key: value.clone() for key, value in STATE.items()}
    state[name].view(-1)[-1] += 1
    write_checkpoint(other, 3, state)
    found = first(whole, other)
    told = found["differences"][0]
    assert found["step"] == 3
    assert told["what"] == f"actor: {name}"
    assert (told["place"], told["count"]) == (STATE[name].numel() - 1, 1)
    exported = [each["what"] for each in found["differences"][1:]]
    assert exported == ([f"actor/huggingface: {name}"] if name.startswith("model.") else [])


def test_nan_equals_nan_and_minus_zero_is_not_zero(whole: Path, other: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in "ab"]
    for run, zero in zip(runs, (0.0, -0.0), strict=True):
        write_run(run, steps=1)
        write_checkpoint(run, 1, {"model.w": torch.tensor([float("nan"), zero])})
    found = first(*runs)["differences"]
    assert [(each["what"], each["place"], each["count"]) for each in found] == [
        ("actor: model.w", 1, 1),
        ("actor/huggingface: model.w", 1, 1),
    ]


def test_what_cannot_be_compared_is_a_line_and_exit_code_2(whole: Path, other: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments in ((whole,), (whole, tmp_path / "nowhere"), (whole, empty), (empty, whole), (whole, whole, whole)):
        result = diff(*arguments)
        assert result.exit_code == 2, arguments
        assert "Traceback" not in result.output
    assert "has no run to compare: there is no metrics.jsonl" in diff(whole, empty).output


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.jsonl", "no json\n"),
        ("metrics.jsonl", '{"actor/loss": 1}\n'),
        ("metrics.jsonl", '{"step": true}\n'),
        ("config.yaml", "a: [1"),
        ("runs.jsonl", "[]\n"),
        ("samples/1.jsonl", "[1]\n"),
        ("global_step_3/trainer.json", "{"),
        ("global_step_3/data.pt", "no tensors"),
        ("global_step_3/actor/.metadata", "no metadata"),
        ("global_step_3/actor/huggingface/model.safetensors", "short"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(whole: Path, other: Path, file: str, content: str) -> None:
    (other / file).write_text(content)
    result = diff(whole, other)
    assert result.exit_code == 2, result.output
    assert result.output.count("\n") == 1, result.output
    assert Path(file).name in result.output or "global_step_3" in result.output


def test_the_last_line_of_a_run_that_was_killed_may_be_half(whole: Path, other: Path) -> None:
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "actor')
    assert diff(whole, other).exit_code == 0
