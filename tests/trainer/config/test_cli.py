import io

import pytest
import yaml
from rich.console import Console

import verl
from tests import forked
from verl.experimental.fully_async_policy.supply import SupplyLost
from verl.trainer.config.cli import run_hydra
from verl.trainer.config.help import plain_page, print_help
from verl.trainer.config.schema import keys
from verl.trainer.ppo.dynamic_sampling import TooFewGroups
from verl.trainer.ppo.skipped_steps import Diverged
from verl.utils.config import ConfigError
from verl.utils.disk import DiskFull
from verl.workers.reward_manager import RewardError


def run(*argv):
    """The configurations that `main` was called with."""
    seen = []
    run_hydra(seen.append, list(argv))
    return seen


def test_main_gets_the_configuration_once():
    (config,) = run("trainer.experiment_name=mine")
    assert config.trainer.experiment_name == "mine"


@pytest.mark.parametrize(
    "argv",
    [
        ["trainer.nnode=2"],
        ["trainer.nnodes"],
        ["trainer.nnodes=x"],
        ["data.truncation=lefty"],
        ["critic.model.lora_rank=1"],
        ["--config-name=nothing"],
        ["--multirun"],
        ["--cfg=everything"],
        ["--cfg=job", "--package=nothing.here"],
        ["algorithm.adv_estimator=grp"],
        ["--trainer.nnodes=1"],
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        run(*argv)
    output = capsys.readouterr()
    assert caught.value.code == 2
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1


def test_a_key_with_dashes_is_told_without(capsys):
    with pytest.raises(SystemExit):
        run("--trainer.nnodes=1")
    assert capsys.readouterr().err.endswith("keys have no dashes before them: trainer.nnodes=1\n")


def test_a_failure_of_the_users_reward_is_one_line_and_a_traceback_if_asked_for(capsys, monkeypatch):
    def main(config):
        raise RewardError("the reward function raised ValueError: first\n  second on sample 3")

    monkeypatch.delenv("VERL_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as caught:
        run_hydra(main, [])
    assert caught.value.code == 1
    said = "error: the reward function raised ValueError: first second on sample 3 (VERL_TRACEBACK=1 shows where)\n"
    assert capsys.readouterr().err == said
    monkeypatch.setenv("VERL_TRACEBACK", "1")
    with pytest.raises(RewardError):
        run_hydra(main, [])


def test_a_config_error_from_main_is_reported_the_same_way(capsys):
    def main(config):
        raise ConfigError("no such model directory: /models/x")

    with pytest.raises(SystemExit):
        run_hydra(main, [])
    assert capsys.readouterr().err == "error: no such model directory: /models/x\n"


def test_any_other_exception_of_main_keeps_its_traceback():
    def main(config):
        raise RuntimeError("worker died")

    with pytest.raises(RuntimeError, match="worker died"):
        run_hydra(main, [])


def test_a_run_warns_of_what_does_less_than_it_seems_to(caplog):
    run("actor_rollout_ref.rollout.val_kwargs.n=4")
    assert [record.getMessage() for record in caplog.records if "val_kwargs.n=4" in record.getMessage()] != []


def test_cfg_job_prints_the_composed_yaml_and_does_not_run(capsys):
    assert run("--cfg", "job", "trainer.nnodes=2", "data.val_files=${data.train_files}") == []
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["nnodes"] == 2
    assert printed["data"]["val_files"] == "${data.train_files}"


def test_cfg_job_can_print_one_section_resolved(capsys):
    run("--cfg", "job", "-p", "data", "--resolve", "data.val_files=${data.train_files}")
    out = capsys.readouterr().out
    assert out.startswith("# @package data\n")
    assert yaml.safe_load(out)["val_files"] == "builtin:arithmetic"


def test_what_cfg_job_prints_can_be_run_again(tmp_path, capsys):
    run("--cfg", "job", "trainer.seed=2", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    (tmp_path / "again.yaml").write_text(capsys.readouterr().out)
    (config,) = run("--config-path", str(tmp_path), "--config-name", "again", "trainer.save_freq=5")
    assert (config.trainer.seed, config.data.train_batch_size, config.trainer.save_freq) == (2, 8, 5)


def test_flags_may_stand_between_overrides():
    (config,) = run("trainer.save_freq=2", "--config-name", "ppo_trainer", "trainer.test_freq=3")
    assert (config.trainer.save_freq, config.trainer.test_freq) == (2, 3)


def test_help_lists_every_key_and_five_examples():
    page = plain_page()
    assert not [key for key in keys() if f"  {key}=" not in page]
    assert page.count("python -m verl.trainer.main_ppo") >= 6
    assert "docs/configuration.md" in page


@pytest.mark.parametrize("terminal", [True, False])
def test_help_can_be_printed_on_a_terminal_and_into_a_pipe(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    print_help(console)
    text = console.file.getvalue()
    assert ("\x1b[" in text) is terminal
    assert "tensor_model_parallel_size" in text
    assert "…" not in text
    assert "custom_reward_function.path=reward.py custom_reward_function.name=compute_score" in text


@pytest.mark.parametrize("width", [60, 80, 140])
def test_help_wraps_at_the_width_of_the_terminal_but_for_commands(width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    print_help(console)
    lines = console.file.getvalue().splitlines()
    assert [line for line in lines if len(line) > width and not line.startswith("    python -m ")] == []


def test_help_can_be_of_some_sections(capsys):
    assert run("--help", "trainer", "checkpoint_engine.deadlines") == []
    page = capsys.readouterr().out
    assert "  trainer.logger=" in page
    assert "  checkpoint_engine.deadlines.stage_s=" in page
    assert "  data." not in page
    assert "usage" not in page
    with pytest.raises(SystemExit):
        run("--help", "trainr")
    assert capsys.readouterr().err == "error: --help trainr: no such section. Did you mean 'trainer'?\n"


def test_the_version_is_that_of_the_package(capsys):
    assert run("--version") == []
    assert capsys.readouterr().out == f"verl-sync {verl.__version__}\n"


def test_a_mistake_prints_no_traceback_and_leaves_no_files(tmp_path):
    for word, expected in (("trainer.nnode=2", 2), ("trainer.seed=2", 0)):
        result = forked.run(run_hydra, id, [word], cwd=tmp_path)
        assert result.returncode == expected, result.stderr
        assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [Diverged, DiskFull, TooFewGroups, SupplyLost])
def test_a_run_that_ends_with_a_sentence_prints_no_traceback(failure, capsys, monkeypatch):
    def train(config):
        raise failure("what happened, and what to do")

    monkeypatch.delenv("VERL_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as caught:
        run_hydra(train, [])
    assert caught.value.code == 1
    assert capsys.readouterr().err == "error: what happened, and what to do (VERL_TRACEBACK=1 shows where)\n"
    monkeypatch.setenv("VERL_TRACEBACK", "1")
    with pytest.raises(failure):
        run_hydra(train, [])
