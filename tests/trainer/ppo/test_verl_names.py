"""Scripts that are written for verl's trainer are told what to write instead, where they say it."""

import importlib

import pytest

from verl.instead.names import NAMES
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.verl_names import METHODS
from verl.utils.config import ConfigError
from verl.utils.import_utils import load_extern_object, load_extern_type


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_a_name_of_verl_that_is_not_here_says_what_to_write_instead(module, name):
    with pytest.raises(ImportError) as caught:
        exec(f"from {module} import {name}", {})
    assert (
        str(caught.value) == f"verl's {name} is not in {module} here: {NAMES[module][name]} (docs/coming-from-verl.md)"
    )


@pytest.mark.parametrize("module", NAMES)
def test_a_name_that_nobody_has_is_missing_as_anywhere(module):
    assert not hasattr(importlib.import_module(module), "nothing_of_that_name")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_nothing_here_would_call_is_refused_where_it_is_defined(name):
    assert not hasattr(RayPPOTrainer, name)
    with pytest.raises(ConfigError) as caught:
        type("Mine", (RayPPOTrainer,), {name: lambda self: None})
    assert f"Mine is written for verl's RayPPOTrainer. {name}: {METHODS[name]}" in str(caught.value)
    assert "run_ppo(config, trainer_class=...)" in str(caught.value)


def test_a_loop_of_verls_is_refused_and_one_of_ours_is_not():
    with pytest.raises(ConfigError, match=r"fit\(self\): it is fit\(self, resume_from\) here"):
        type("Mine", (RayPPOTrainer,), {"fit": lambda self: None})
    type("Mine", (RayPPOTrainer,), {"fit": lambda self, resume_from=None: None})
    type("Mine", (RayPPOTrainer,), {"fit": lambda self, *args, **kwargs: None})


def test_verls_constructor_is_told_how_a_run_is_made():
    class Mine(RayPPOTrainer):
        def __init__(self, **given):
            super().__init__(**given)

    for cls in (RayPPOTrainer, Mine):
        with pytest.raises(ConfigError, match=r"\(tokenizer, role_worker_mapping\): these are arguments of verl's"):
            cls(config=None, tokenizer=None, role_worker_mapping={})
        with pytest.raises(TypeError):
            cls(config=None)


@pytest.mark.parametrize("load", [load_extern_object, load_extern_type])
def test_objects_of_files_are_loaded_under_verls_names(tmp_path, load):
    (tmp_path / "mine.py").write_text("class Mine:\n    size = 3\n")
    assert load(str(tmp_path / "mine.py"), "Mine").size == 3
    with pytest.raises(ConfigError, match="is not defined in"):
        load(str(tmp_path / "mine.py"), "Yours")
