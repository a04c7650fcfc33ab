"""What importing the checkpoint engine costs and offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import verl.checkpoint_engine
from verl.checkpoint_engine.support.registry import Registry

HEAVY = ("torch", "ray", "vllm", "transformers")


@pytest.mark.parametrize(
    "statement",
    [
        "import verl.checkpoint_engine",
        "import verl.checkpoint_engine.sync.manager",
        "import verl.checkpoint_engine.sync.trainer_rank, verl.checkpoint_engine.sync.rollout_node",
        "import verl.checkpoint_engine.engines.vllm.plugin",
        "import verl.checkpoint_engine.parameter_server",
        "from verl.checkpoint_engine.parameter_server import buckets, metas, records",
        "import verl.checkpoint_engine.update",
        "from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, SyncAborted",
    ],
)
def test_deciding_needs_none_of_the_heavy_packages(statement: str):
    code = f"{statement}\nimport sys\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_had_from_the_package():
    for name in verl.checkpoint_engine.__all__:
        found = getattr(verl.checkpoint_engine, name)
        assert isinstance(found, Registry) or found.__name__ in (name, "TensorSpec")
        assert name in dir(verl.checkpoint_engine)


def test_what_a_parameter_server_s_user_needs_can_be_had_from_its_package():
    from verl.checkpoint_engine import parameter_server

    for name in parameter_server.__all__:
        assert getattr(parameter_server, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'ParameterServers'"):
        parameter_server.ParameterServers  # noqa: B018


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'CheckpointEngin'"):
        verl.checkpoint_engine.CheckpointEngin  # noqa: B018
