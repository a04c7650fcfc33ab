"""What a run writes down about itself, and whether the same run comes out of it."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from shutil import which

import pytest
import yaml

from tests.trainer.config.launches import LAUNCHES
from verl.trainer.config.cli import run_hydra
from verl.trainer.config.loader import load_config
from verl.trainer.config.record import CONFIG_FILE, RUNS_FILE, command, commits, record_run, versions
from verl.utils.config import ConfigError
from verl.workers.config import PPOConfig

COMMAND = (
    "actor_rollout_ref.actor.optim.lr=3e-6",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=naive",
    "+ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG=WARN",
)

HYBRID = [one for one in LAUNCHES if one.mode == "hybrid" and not one.refused]


def recorded(directory: Path, *overrides: str) -> PPOConfig:
    """Run the command line up to the record; its configuration."""
    seen: list[PPOConfig] = []

    def main(config: PPOConfig) -> None:
        record_run(directory, config)
        seen.append(config)

    run_hydra(main, overrides)
    return seen[0]


def test_the_directory_of_a_run_is_a_configuration_of_the_same_run(tmp_path: Path):
    first = recorded(tmp_path, *COMMAND)
    again: list[PPOConfig] = []
    run_hydra(again.append, [f"--config-path={tmp_path}"])
    assert again == [first]


def test_what_is_added_to_a_recorded_run_reaches_what_follows_it(tmp_path: Path):
    recorded(tmp_path, *COMMAND)
    again: list[PPOConfig] = []
    words = ["actor_rollout_ref.actor.strategy=megatron", "trainer.experiment_name=other"]
    run_hydra(again.append, [f"--config-path={tmp_path}", *words])
    run_hydra(again.append, [*COMMAND, *words])
    assert again[0] == again[1]
    assert again[0].critic.strategy == "megatron"


@pytest.mark.parametrize("launch", HYBRID[::12], ids=lambda one: one.name)
def test_a_launch_of_verls_is_the_same_from_its_record(tmp_path: Path, launch):
    first = recorded(tmp_path, *launch.argv.split())
    again: list[PPOConfig] = []
    run_hydra(again.append, [f"--config-path={tmp_path}"])
    assert again == [first]


def test_a_configuration_that_no_command_line_gave_is_written_whole(tmp_path: Path):
    config = load_config(["trainer.seed=7"])
    record_run(tmp_path, config)
    assert load_config(config_path=tmp_path, config_name="config") == config


def test_each_start_says_when_where_and_with_what(tmp_path: Path):
    config = load_config()
    record_run(tmp_path, config)
    record_run(tmp_path, config, resumed_from=tmp_path / "global_step_2")
    first, second = (json.loads(line) for line in (tmp_path / RUNS_FILE).read_text().splitlines())
    assert "resumed_from" not in first
    assert second["resumed_from"] == str(tmp_path / "global_step_2")
    assert shlex.split(first["command"])
    assert first["directory"] == str(Path.cwd())
    assert first["versions"] == versions()
    assert {"verl-sync", "python", "torch", "transformers", "ray", "vllm"} <= set(versions())


def test_secrets_of_the_environment_are_left_out_and_asked_for_again(tmp_path: Path):
    secret = "+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY=abcdef"
    recorded(tmp_path, secret, "+ray_kwargs.ray_init.runtime_env.env_vars.HOME_DIR=/here", "data.prompt_key=question")
    written = (tmp_path / CONFIG_FILE).read_text()
    assert "abcdef" not in written
    values = yaml.safe_load(written)
    assert values["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]["HOME_DIR"] == "/here"
    assert values["data"]["prompt_key"] == "question"
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        load_config(config_path=tmp_path, config_name="config")
    assert "abcdef" not in command(["python", secret])
    assert "abcdef" not in command(["+ray_init.runtime_env.env_vars={A: 1, HF_TOKEN: abcdef}"])


def test_a_full_disk_is_logged_and_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / CONFIG_FILE).mkdir()
    record_run(tmp_path, load_config())
    assert CONFIG_FILE in caplog.text
    assert (tmp_path / RUNS_FILE).is_file()


@pytest.mark.skipif(which("git") is None, reason="git is missing")
def test_a_commit_is_of_a_checkout_and_not_of_a_directory_that_a_package_is_installed_into(tmp_path: Path):
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    package = tmp_path / "installed"
    package.mkdir()
    (package / "__init__.py").touch()
    (tmp_path / "train.sh").touch()
    assert commits(package, package) == {}
    git("init")
    git("add", "train.sh")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first")
    assert commits(package, Path("/")) == {}
    (found,) = commits(package, tmp_path).values()
    assert len(found) == 40
    (tmp_path / "train.sh").write_text("changed")
    assert commits(package, tmp_path) == {str(tmp_path): f"{found}-dirty"}
    git("add", "installed")
    assert list(commits(package, Path("/"))) == [str(tmp_path)]


def test_a_directory_without_a_record_has_the_name_of_its_file_as_before(tmp_path: Path, capsys):
    (tmp_path / CONFIG_FILE).write_text("{}")
    with pytest.raises(SystemExit):
        run_hydra(lambda config: None, [f"--config-path={tmp_path}"])
    assert "no configuration file ppo_trainer.yaml" in capsys.readouterr().err
