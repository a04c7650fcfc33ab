import importlib.util
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from verl.checkpoint_engine.registry import BUILTIN
from verl.trainer.config.loader import load_config
from verl.trainer.config.schema import documented_sections, keys
from verl.workers.config import PPOConfig

REPOSITORY = Path(__file__).resolve().parents[3]


def generator():
    spec = importlib.util.spec_from_file_location("generate_config", REPOSITORY / "scripts" / "generate_config.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_yaml_tree_and_the_reference_are_up_to_date():
    stale = [
        str(path)
        for path, text in generator().rendered().items()
        if not (REPOSITORY / path).is_file() or (REPOSITORY / path).read_text(encoding="utf-8") != text
    ]
    assert not stale, "run python scripts/generate_config.py"


def test_no_yaml_file_lies_beside_the_generated_ones():
    generated = {REPOSITORY / path for path in generator().rendered()}
    assert set((REPOSITORY / "verl/trainer/config").rglob("*.yaml")) <= generated


def test_composing_the_tree_gives_the_dataclasses_defaults():
    assert load_config() == PPOConfig()


def test_every_key_is_in_the_reference_with_its_meaning():
    reference = (REPOSITORY / "docs/configuration.md").read_text(encoding="utf-8")
    missing = [key.path for key in keys().values() if f"| `{key.path}` |" not in reference or not key.help]
    assert not missing


@pytest.mark.parametrize(("name", "backend"), BUILTIN.items())
def test_every_option_of_a_backend_is_in_the_reference_with_its_meaning(name, backend):
    section = f"checkpoint_engine.engine_kwargs.{name}"
    (documented,) = [each.keys for each in documented_sections() if each.path == section]
    assert [key.path for key in documented] == [f"{section}.{field.name}" for field in fields(backend.options)]
    assert all(key.help for key in documented)


def test_plain_yaml_readers_see_numbers_where_we_have_numbers():
    text = (REPOSITORY / "verl/trainer/config/actor/dp_actor.yaml").read_text(encoding="utf-8")
    plain, default = yaml.safe_load(text), PPOConfig().actor_rollout_ref.actor
    assert {"clip_ratio": plain["clip_ratio"], "weight_decay": plain["optim"]["weight_decay"]} == {
        "clip_ratio": default.clip_ratio,
        "weight_decay": default.optim.weight_decay,
    }
