"""`~` and None in values."""

from pathlib import Path

import pytest

from verl.trainer.config.loader import load_config
from verl.trainer.config.schema import keys
from verl.utils.config import ConfigError

PATHS = ("trainer.default_local_dir", "trainer.rollout_data_dir", "custom_reward_function.path", "data.val_files")


@pytest.mark.parametrize("key", PATHS)
def test_a_tilde_is_the_home_directory(key):
    found = load_config([f"{key}=~/x"])
    for name in key.split("."):
        found = getattr(found, name)
    assert found == str(Path.home() / "x")


def test_none_is_told_once_for_every_key_that_may_be_null():
    kept = ("global_profiler.steps",)  # without a tool it has no effect, whatever it says
    optional = [path for path, key in keys().items() if key.default is None and path not in kept]
    assert {"data.val_files", "actor_rollout_ref.model.path", "critic.model.path"} <= {*optional}
    with pytest.raises(ConfigError) as caught:
        load_config(["trainer.resume_mode=resume_path", *(f"{path}=None" for path in optional)])
    told = str(caught.value).splitlines()
    for path in optional:
        of_key = [line for line in told if line.startswith(f"{path}=")]
        assert of_key == [f"{path}=None: None is a word here; write null"]
