"""Every name that verl has registered for a configuration is taken, or refused with what to say instead."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.originals.original import OURS, VERL, computed, differences
from verl.experimental.agent_loop.registry import known_loops
from verl.instead.modules import MODULES, instead_of
from verl.instead.names import ELSEWHERE, NAMES
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
    of_source = SimpleNamespace(count=1, first="row 0", without_truth=0, agents=set())
    require_rewards(load_config([]), SimpleNamespace(sources={source: of_source}), None)


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


def _public(file: Path) -> set[str]:
    """What a module makes or, as a package, passes on: functions, classes and what it assigns, not private."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and file.name == "__init__.py" and node.level:
            found |= {alias.asname or alias.name for alias in node.names}
    return {name for name in found if not name.startswith("_") and name not in ("logger", "version_folder", "*")}


def _walked() -> dict[str, set[str]]:
    """Names by module of the installed verl: every file of it, none imported."""
    files = {file: file.relative_to(VERL).with_suffix("").parts for file in sorted((VERL / "verl").rglob("*.py"))}
    return {".".join(parts).removesuffix(".__init__"): _public(file) for file, parts in files.items()}


WALKED = _walked()


def test_every_module_of_verls_is_here_or_ends_in_one_line_that_says_what_to_write_instead() -> None:
    assert len(WALKED) > 350
    plain = []
    for module in WALKED:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as exc:
            if not str(exc).startswith("verl's module verl.") or "\n" in str(exc):
                plain.append(str(exc))
    assert plain == []


def test_every_public_name_of_verls_is_in_its_module_or_ends_in_one_line_that_says_what_to_write_instead() -> None:
    here = {module: names for module, names in WALKED.items() if module != "verl" and _is_here(module)}
    assert len(here) > 60
    untold = []
    for module, names in here.items():
        for name in names:
            if f"{module}.{name}" in WALKED:
                continue
            try:
                getattr(importlib.import_module(module), name)
            except ImportError as exc:
                assert str(exc).startswith(f"verl's {name} is not in {module} here: "), exc
            except AttributeError:
                untold.append(f"{module}.{name}")
    assert untold == []


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # what is above it is not here
        return False


def test_what_is_told_of_is_not_here() -> None:
    """A sentence about a module or name that has come since would never be read, or would hide it."""
    files = [module for module in MODULES if (OURS / module.replace(".", "/")).with_suffix(".py").exists()]
    assert set(files) <= NAMES.keys()  # where verl has, or had, a package
    for module, names in NAMES.items():
        found = vars(importlib.import_module(module))
        assert [name for name in names if name in found] == [], module
    for module, places in ELSEWHERE.items():
        for name, place in places.items():
            assert getattr(importlib.import_module(module), name) is vars(importlib.import_module(place))[name]


@pytest.mark.parametrize("module", ["verl.utils.kernel", "verl.workers.actor", "verl.workers.rollout.vllm_rollout"])
def test_code_that_asks_for_a_module_or_tries_it_finds_that_it_is_not_here(module: str) -> None:
    package, _, name = module.rpartition(".")
    assert importlib.util.find_spec(module) is None
    assert not hasattr(importlib.import_module(package), name)
    told = str(instead_of(module))
    for statement in (f"import {module}", f"from {module} import x", f"from {package} import {name}"):
        with pytest.raises(ModuleNotFoundError) as caught:
            exec(statement)
        assert told in str(caught.value)


def test_modules_of_nobody_end_as_python_ends_them() -> None:
    assert importlib.util.find_spec("verl.utils.of_nobody") is None
    with pytest.raises(ModuleNotFoundError, match="^No module named 'verl.utils.of_nobody'$"):
        importlib.import_module("verl.utils.of_nobody")


def test_what_a_gathered_module_gives_is_pickled_by_the_place_where_it_is() -> None:
    from verl.utils.debug import marked_timer

    assert pickle.loads(pickle.dumps(marked_timer)) is marked_timer
    assert importlib.util.find_spec("verl.utils.debug") is not None


def test_importing_verl_reads_the_modules_that_are_not_here_only_when_one_is_asked_for() -> None:
    script = "import sys, verl; print(*(name for name in sys.modules if name.startswith('verl')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=OURS)
    assert sorted(done.stdout.split()) == ["verl", "verl.instead", "verl.instead.names"]


def test_the_small_functions_that_recipes_import_return_what_verls_return() -> None:
    verls, ours = (computed("call_functions.py", 7, folder) for folder in (VERL, OURS))
    assert len(verls) == 150
    undefined = 0
    for theirs, found in zip(verls, ours, strict=True):
        assert found.keys() == theirs.keys()
        differing = {name for name in found if not _is_like(found[name], theirs[name])}
        of_few = {name for name in differing if "masked_var" in name}
        assert differing == of_few, theirs
        assert all(theirs[name] == "ValueError" or theirs[name][1] < 0 for name in of_few), theirs
        assert all(found[name][1] >= 0 for name in of_few), found
        undefined += len(of_few)
    assert undefined
    assert differences()["`masked_var` of weights that sum to 1 or less"]["why"]


def _is_like(found: Any, expected: Any) -> bool:
    """Equal, floats to rounding; NaN is like itself."""
    if isinstance(found, float) and isinstance(expected, float):
        return found == pytest.approx(expected, rel=1e-6, abs=1e-7, nan_ok=True)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(_is_like, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_is_like(found[key], expected[key]) for key in found)
    return bool(found == expected)
