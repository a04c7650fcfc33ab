"""Keys of PyPI's verl and their defaults: the table of launches has all of them, and the same follow others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.originals.original import VERL, differences
from verl.trainer.config.from_verl.rules import known_to_verl
from verl.trainer.config.loader import load_config

FILES = [
    *(f"trainer/config/_generated_ppo_{name}.yaml" for name in ("trainer", "megatron_trainer")),
    *(
        f"experimental/one_step_off_policy/config/one_step_off_ppo_{name}.yaml"
        for name in ("trainer", "megatron_trainer")
    ),
    *(
        f"experimental/fully_async_policy/config/fully_async_ppo_{name}.yaml"
        for name in ("trainer", "megatron_trainer")
    ),
]


def values(section: DictConfig, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key below `section` with its default, where that is another key's by its name."""
    for key in section:
        node, dotted = section._get_node(key), f"{above}{key}"
        if isinstance(node, DictConfig) and len(node):
            yield from values(node, f"{dotted}.")
        else:
            yield dotted, OmegaConf.to_container(node) if OmegaConf.is_config(node) else node._value()


@pytest.mark.parametrize("file", FILES)
def test_every_key_of_verl_is_known_with_its_default(file: str) -> None:
    found = dict(values(OmegaConf.load(VERL / "verl" / file)))
    known = known_to_verl()
    own = [key for key in found if not key.startswith(("hydra.", "defaults"))]
    assert len(own) > 5
    assert [key for key in own if key not in known] == []
    assert [(key, found[key], known[key]) for key in own if found[key] not in known[key]] == []


@pytest.mark.parametrize(
    "overrides",
    [
        {"actor.loss_scale_factor": 3},
        {"actor.loss_scale_factor": 3, "critic.loss_scale_factor": None},
        {"actor.loss_scale_factor": 3, "critic.loss_scale_factor": 5},
        {"actor.ppo_epochs": 2, "actor.shuffle": True, "actor.loss_agg_mode": "seq-mean-token-sum"},
        {"actor.use_dynamic_bsz": True, "critic.ppo_epochs": 3},
    ],
    ids=str,
)
def test_what_is_not_set_of_a_critic_follows_the_actor_as_verls_does(overrides: dict[str, Any]) -> None:
    given = {key.replace("actor.", "actor_rollout_ref.actor."): value for key, value in overrides.items()}
    verls = OmegaConf.load(VERL / "verl" / FILES[0])
    for key, value in given.items():
        OmegaConf.update(verls, key, value)
    micro = [f"{role}.ppo_micro_batch_size_per_gpu=1" for role in ("actor_rollout_ref.actor", "critic")]
    ours = load_config([*micro, *(f"{key}={json.dumps(value)}" for key, value in given.items())]).critic
    for name in ("ppo_epochs", "shuffle", "loss_agg_mode", "loss_scale_factor", "use_dynamic_bsz"):
        assert getattr(ours, name) == verls.critic[name]


def test_what_a_checkpoint_lacks_is_listed_with_the_reason() -> None:
    assert differences()["`checkpoint.load_contents` that is not set"]["why"]
    verls = OmegaConf.load(VERL / "verl" / FILES[0]).actor_rollout_ref.actor.checkpoint
    verls.save_contents = ["model"]
    assert verls.load_contents == ["model"]
    ours = load_config(["actor_rollout_ref.actor.checkpoint.save_contents=[model]"]).actor_rollout_ref.actor.checkpoint
    assert ours.load_contents == ["model", "optimizer", "extra"]
