"""What `--check` says of the built-in job without torch is what the whole check says."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from verl.trainer.config.checking import on_its_device
from verl.trainer.config.loader import load_config
from verl.trainer.ppo.known_good import FREE, known_good
from verl.utils.device import any_device

HEAVY = ("torch", "transformers", "ray", "tensordict", "pyarrow", "vllm")
FREELY = (
    (),
    ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.total_training_steps=5"),
    (
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.rollout.n=4",
        "data.max_response_length=400",
        "trainer.logger=[console,wandb]",
        "trainer.n_gpus_per_node=1",
    ),
)
LEFT_TO_THE_WHOLE_CHECK = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.exact=true",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "algorithm.adv_estimator=gae",
    "critic.enable=true",
    "data.custom_cls.path=mine.py",
    "data.max_prompt_length=8",
    "data.max_response_length=100000",
    "data.train_batch_size=8192",
    "data.train_max_samples=10",
    "reward_model.reward_manager=dapo",
    "trainer.placement=separate",
)


def resolved(*overrides):
    with any_device():
        return on_its_device(load_config(overrides))


@pytest.mark.parametrize("overrides", FREELY, ids=["default", "shorter", "other"])
def test_a_known_job_is_described_as_by_the_whole_check(overrides):
    from verl.trainer.main_ppo import check_ppo

    config = resolved(*overrides)
    known = known_good(config)
    assert known is not None
    whole = check_ppo(config)
    assert replace(known, plan=[]) == replace(whole, plan=[])
    assert list(map(without_free_memory, known.plan)) == list(map(without_free_memory, whole.plan))


def without_free_memory(line):
    """Other processes take some in between."""
    return re.sub(r"; .* free in ", "; ... free in ", line)


@pytest.mark.parametrize("override", LEFT_TO_THE_WHOLE_CHECK)
def test_what_may_be_wrong_is_left_to_the_whole_check(override):
    assert known_good(resolved(override)) is None


def test_a_model_that_is_not_whole_any_more_is_left_to_the_whole_check(tmp_path, monkeypatch):
    from verl.utils import builtin

    monkeypatch.setattr(builtin, "builtin_model", lambda name: tmp_path)
    assert known_good(resolved()) is None


def test_whether_a_checkpoint_is_of_its_model_is_left_to_the_whole_check(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    assert known_good(resolved(f"trainer.default_local_dir={tmp_path}")) is None


def test_every_free_key_is_a_key():
    from verl.trainer.config.schema import keys

    assert [free for free in FREE if not any(key.startswith(free) for key in keys())] == []


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--check"], ""), (["--help"], ""), (["--check", "trainer.save_frek=1"], "unknown keys: 1\nerror:")],
)
def test_the_built_in_job_is_checked_and_explained_without_heavy_imports(words, told):
    code = (
        "import contextlib, sys; from verl.trainer.main_ppo import main\n"
        "with contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        f"print(sorted({set(HEAVY)!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert done.stderr.startswith(told)
