"""Whole launches of verl's kind through `--check`: see `launches.py`."""

import importlib.util
from copy import deepcopy
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.trainer.config.launches import GRPO, LAUNCHES, Launch, check
from verl.trainer.config.from_verl.rules import ALL_KEYS, known_to_verl
from verl.trainer.config.from_verl.translation import translated
from verl.trainer.config.loader import build_config, compose_tree
from verl.trainer.config.schema import keys
from verl.trainer.config.suggest import key_error


@pytest.mark.job  # a second each
@pytest.mark.cells(3)
@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.name)
def test_a_launch_is_accepted_or_refused_with_one_sentence(launch):
    code, out, errors = check(launch)
    if launch.refused:
        assert code == 2
        assert out == ""
        assert [error for error in errors if launch.refused not in error] == []
        assert errors
    else:
        assert (code, errors) == (0, [])
        assert launch.said in out
        assert out.endswith("nothing was started\n")


def test_everything_that_is_wrong_is_told_at_once_by_kinds(capsys):
    argv = f"{GRPO} trainer.nnode=2 actor_rollout_ref.actor.veomni.fsdp_size=4 data.truncation=lefty trainer.seed=x"
    code, _, errors = check(Launch("several mistakes", "hybrid", argv))
    assert code == 2
    assert [error.removeprefix("error: ").split("=")[0][:35] for error in errors] == [
        "unknown configuration key 'trainer.",
        "verl key 'actor_rollout_ref.actor.v",
        "data.truncation",
        "trainer.seed takes an integer, not ",
    ]


def test_no_key_of_verl_is_called_unknown():
    assert [key for key in known_to_verl() if key_error(key)] == []


def test_every_key_of_verl_is_accepted_with_verls_default():
    refused = {}
    for key, defaults in known_to_verl().items():
        if key in keys() or "${" in str(defaults[0]) or defaults[0] == "???":
            continue
        translation = translated(nested(key, defaults[0]))
        if translation.problems or translation.unknown:
            refused[key] = translation.problems or translation.unknown
    assert refused == {}


def test_the_default_of_another_mode_is_no_default():
    """Megatron's configuration has it; with FSDP the reference policy would have another engine than the actor."""
    key, engine = "actor_rollout_ref.ref.strategy", "actor_rollout_ref.actor.strategy"
    tree = OmegaConf.to_container(compose_tree([]), resolve=True)
    put(tree, key, "megatron")
    [problem] = build_config(tree, {key}).problems
    assert f"set {engine}" in problem
    put(tree, engine, "megatron")
    assert not any(key in line for line in build_config(tree, {key}).problems)


def nested(dotted, value):
    name, _, below = dotted.partition(".")
    return {name: nested(below, value) if below else value}


def test_a_key_without_effect_is_told_with_its_value_and_why():
    _, out, _ = check(
        Launch("", "hybrid", "actor_rollout_ref.actor.use_torch_compile=True trainer.use_legacy_worker_impl=auto")
    )
    assert "warning: actor_rollout_ref.actor.use_torch_compile=true: nothing is compiled" in out
    assert "no effect: trainer.use_legacy_worker_impl=auto: there is one implementation" in out


def test_a_package_that_is_not_here_is_told_and_no_error_of_the_launch(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "sglang" else find(name, *more)
    )
    code, out, errors = check(Launch("", "hybrid", "actor_rollout_ref.rollout.name=sglang"))
    assert (code, errors) == (0, [])
    assert out.count("not here: rollout.name=sglang needs the package 'sglang'") == 1


def test_the_files_of_verls_keys_are_part_of_the_package():
    assert Path(ALL_KEYS).name in (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")


def test_no_key_of_verl_with_another_value_is_dropped_without_a_word():
    """It changes the configuration, is told, or is refused; or it says what the configuration has in any case."""
    options = ["actor_rollout_ref.model.lora_rank=8", "critic.model.path=x", "data.train_files=x"]
    tree = OmegaConf.to_container(compose_tree(["actor_rollout_ref.model.path=x", *options]), resolve=True)
    base, dropped, tried = build_config(tree), [], 0
    for key, defaults in known_to_verl().items():
        if key.endswith("._target_"):
            continue
        tried += 1
        value = other_than(defaults)
        values = deepcopy(tree)
        put(values, key, value)
        found = build_config(values, {key})
        told = len(found.problems) > len(base.problems) or len(found.notes) > len(base.notes)
        if not told and found.config == base.config and had(base.config, key) != value:
            dropped.append(f"{key}={value}")
    assert tried > 900
    assert dropped == []


def other_than(defaults):
    """A value of the same kind that is none of them, where there is one."""
    default = defaults[0]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return next(default + step for step in (1, 2, 3) if default + step not in defaults)
    return ["other"] if isinstance(default, list) else {"other": 1} if isinstance(default, dict) else "other"


def put(values, dotted, value):
    *path, last = dotted.split(".")
    for name in path:
        if not isinstance(values.get(name), dict):
            values[name] = {}
        values = values[name]
    values[last] = value


def had(config, dotted):
    for name in dotted.split("."):
        config = getattr(config, name, None)
    return config
