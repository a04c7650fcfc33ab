from dataclasses import replace

import pytest

from verl.trainer.ppo.checkpoints import LATEST, CheckpointDirectory, TrainerState
from verl.utils.config import ConfigError
from verl.workers.config import TrainerConfig


@pytest.fixture
def config(tmp_path):
    return TrainerConfig(default_local_dir=str(tmp_path / "out"))


def state(step):
    return TrainerState(step=step, dataloader={"position": step}, kl_coef=0.5, rewards_before={"x": 0.25})


def save(config, *steps):
    for step in steps:
        with CheckpointDirectory(config).writing(state(step)) as directory:
            (directory / "actor").mkdir()
            (directory / "actor/weights").write_text(f"of step {step}")


def names(config):
    return sorted(path.name for path in CheckpointDirectory(config).root.iterdir())


def test_what_was_saved_last_is_found_and_read(config):
    assert CheckpointDirectory(config).find() is None
    save(config, 1, 2)
    found = CheckpointDirectory(config).find()
    assert found.name == "global_step_2"
    assert CheckpointDirectory.read(found) == state(2)
    assert (found / "actor/weights").read_text() == "of step 2"


def test_a_save_that_does_not_get_to_its_end_leaves_the_last_one_in_force(config):
    save(config, 1)
    with (
        pytest.raises(RuntimeError),
        CheckpointDirectory(config).writing(state(2)) as directory,
    ):
        (directory / "actor").mkdir()
        raise RuntimeError("disk full")
    assert names(config) == [".global_step_2.partial", "global_step_1", LATEST]
    assert CheckpointDirectory(config).find().name == "global_step_1"
    save(config, 2)  # the same step again, over what was left
    assert names(config) == ["global_step_1", "global_step_2", LATEST]
    assert CheckpointDirectory(config).find().name == "global_step_2"


def test_a_run_can_be_told_to_start_again(config):
    save(config, 1)
    assert CheckpointDirectory(replace(config, resume_mode="disable")).find() is None


def test_a_run_can_be_told_where_to_go_on(config, tmp_path):
    save(config, 1, 2)
    earlier = CheckpointDirectory(config).root / "global_step_1"
    resume = replace(config, resume_mode="resume_path", resume_from_path=str(earlier))
    assert CheckpointDirectory(resume).find() == earlier
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        CheckpointDirectory(replace(resume, resume_from_path=str(tmp_path))).find()


def test_a_pointer_to_something_incomplete_is_an_error_not_a_fresh_start(config):
    save(config, 1)
    (CheckpointDirectory(config).root / "global_step_1/trainer.json").unlink()
    with pytest.raises(ConfigError, match=r"global_step_1, which is not a complete checkpoint.*resume_mode=disable"):
        CheckpointDirectory(config).find()


def test_the_oldest_are_deleted_by_number_and_nothing_else_is(config):
    config = replace(config, max_actor_ckpt_to_keep=2)
    save(config, 8, 9)
    (CheckpointDirectory(config).root / "global_step_1.best").mkdir()
    save(config, 10)
    assert names(config) == ["global_step_1.best", "global_step_10", "global_step_9", LATEST]
