"""Every name that verl has registered for a configuration is taken, or refused with what to say instead."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.originals.original import VERL, computed
from verl.experimental.agent_loop.registry import known_loops
from verl.trainer.config.loader import load_config
from verl.trainer.ppo.data import require_rewards
from verl.utils.config import ConfigError
from verl.workers.config.distillation import ESTIMATORS, FORWARD_KL_TOPK
from verl.workers.reward_manager.registry import get_reward_manager_cls
from verl.workers.rollout.registry import RolloutReplicaRegistry


def one_of(*known: str) -> Callable[[str], Any]:
    def find(name: str) -> None:
        if name not in known:
            raise ConfigError(name)

    return find


def set_to(key: str, *others: str) -> Callable[[str], Any]:
    return lambda name: load_config([f"{key}={name}", *others])


def rewarded(source: str) -> None:
    """As the driver looks at data before anything starts."""
    require_rewards(SimpleNamespace(sources={source: SimpleNamespace(count=1, first="row 0", without_truth=0)}), "key")


TAKES: dict[str, Callable[[str], Any]] = {
    "estimators": set_to("algorithm.adv_estimator"),
    "losses": set_to(
        "actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.actor.policy_loss.dro_beta=0.1"
    ),
    "distillation losses": one_of(*ESTIMATORS, FORWARD_KL_TOPK),
    "reward managers": get_reward_manager_cls,
    "agent loops": one_of(*known_loops()),
    "rollouts": one_of(*RolloutReplicaRegistry.names()),
    "data sources": rewarded,
}
OF_SEARCH = [f"searchR1_{name}" for name in ("nq", "triviaqa", "popqa", "hotpotqa", "musique", "bamboogle")]
REFUSED = {
    **{("data sources", name): "custom_reward_function" for name in ("codecontests", "apps", "codeforces", "taco")},
    **{("data sources", name): "for search tools" for name in [*OF_SEARCH, "searchR1_2wikimultihopqa"]},
    ("data sources", "hiyouga/geometry3k"): "whose rule is not here yet",
    ("losses", "bypass_mode"): "algorithm.rollout_correction.bypass_mode=true",
    ("reward managers", "batch"): "Let the function take one sample",
    ("reward managers", "rate_limited"): "let the function itself wait",
    ("rollouts", "trtllm"): "trtllm",
}
"""What the refusal says."""


@pytest.fixture(scope="module")
def names() -> dict[str, list[str]]:
    found: dict[str, list[str]] = computed("list_names.py", None, VERL)
    return found


@pytest.mark.parametrize("kind", TAKES)
def test_every_name_that_verl_has_registered_is_taken_or_refused_with_what_to_say(
    names: dict[str, list[str]], kind: str
) -> None:
    assert len(names[kind]) >= 2
    refused = {}
    for name in names[kind]:
        try:
            TAKES[kind](name)
        except ConfigError as exc:
            refused[kind, name] = str(exc)
    expected = {each: said for each, said in REFUSED.items() if each[0] == kind}
    assert refused.keys() == expected.keys()
    assert [each for each, said in expected.items() if said not in refused[each]] == []


def test_every_name_that_recipes_import_from_verls_trainer_is_here_or_told_what_to_write_instead(
    names: dict[str, list[str]],
) -> None:
    assert len(names["names of the trainer"]) > 40
    told, missing = [], []
    for module, _, name in (name.rpartition(".") for name in names["names of the trainer"]):
        try:
            getattr(importlib.import_module(module), name)
        except ImportError as exc:
            told.append(str(exc))
        except AttributeError:
            missing.append(f"{module}.{name}")
    assert missing == []
    assert all(text.startswith("verl's ") for text in told)
    assert len(told) < len(names["names of the trainer"])
