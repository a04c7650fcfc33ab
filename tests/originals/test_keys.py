"""Keys of PyPI's verl and their defaults: the table from which launches are understood has all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.originals.original import VERL
from verl.trainer.config.from_verl.rules import known_to_verl

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
