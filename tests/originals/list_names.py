"""What PyPI's verl has registered under names that a configuration may say: nothing comes in, lists by kind go out."""

import ast
import contextlib
import importlib
import inspect
import json
import sys
from pathlib import Path

from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY

from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.utils import reward_score
from verl.workers.reward_manager.registry import REWARD_MANAGER_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

REGISTRIES = {
    "estimators": ADV_ESTIMATOR_REGISTRY,
    "losses": POLICY_LOSS_REGISTRY,
    "distillation losses": DISTILLATION_LOSS_REGISTRY,
    "reward managers": REWARD_MANAGER | REWARD_MANAGER_REGISTRY,
    "agent loops": _agent_loop_registry,
    "rollouts": RolloutReplicaRegistry._registry,
}


def sources() -> list[str]:
    """The data sources that verl has a rule for, among all words of the module: it says of others that it has none."""
    tree = ast.parse(Path(inspect.getfile(reward_score)).read_text())
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return [word for word in words if len(word.split()) == 1 and has_rule(word)]


MODULES = [f"verl.trainer.ppo.{name}" for name in ("ray_trainer", "metric_utils", "reward", "utils")]


def names_of_trainer() -> list[str]:
    """`module.name` of what these modules have of the trainer's, made there or imported."""
    return [
        f"{module}.{name}"
        for module in MODULES
        for name, found in vars(importlib.import_module(module)).items()
        if callable(found) and not name.startswith("_")
        if getattr(found, "__module__", "").startswith("verl.trainer.ppo.")
    ]


def has_rule(source: str) -> bool:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            reward_score.default_compute_score(source, "3", "3")
    except NotImplementedError:
        return False
    except Exception:  # noqa: BLE001 - a rule that lacks a package, or its own kind of truth
        return True
    return True


if __name__ == "__main__":
    json.load(sys.stdin)
    names = {**REGISTRIES, "data sources": sources(), "names of the trainer": names_of_trainer()}
    sys.stdout.write("\n" + json.dumps({kind: sorted(map(str, found)) for kind, found in names.items()}))
