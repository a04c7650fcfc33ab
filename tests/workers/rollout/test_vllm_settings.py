"""What a vLLM replica refuses on the driver about experts and data-parallel ranks, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl.utils.builtin import make_tiny_model
from verl.utils.config import ConfigError, from_mapping
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout import RolloutReplica, RolloutReplicaRegistry

DEALT = {"data_parallel_size": 2, "expert_parallel_size": 2}
ADAPTERS = {"lora_rank": 8, "lora": {"merge": False}}


def replica(path: Path, *, name: str = "vllm", model: dict[str, Any] | None = None, **config: Any) -> RolloutReplica:
    settings = RolloutConfig(name=name, max_model_len=64, **config)
    served = from_mapping(HFModelConfig, {"path": str(path), **(model or {})})
    return RolloutReplicaRegistry.get(name)(replica_rank=0, config=settings, model=served, device="cuda")


@pytest.mark.parametrize(
    ("tensor", "data", "experts", "ranks"),
    [(1, 1, 1, 1), (2, 1, 2, 2), (2, 4, 1, 2), (2, 4, 2, 2), (2, 4, 8, 8), (1, 4, 4, 4)],
)
def test_data_parallel_ranks_are_one_replica_where_experts_are_dealt_out_over_them(
    tmp_path: Path, tensor: int, data: int, experts: int, ranks: int
):
    sizes = {"tensor_model_parallel_size": tensor, "data_parallel_size": data, "expert_parallel_size": experts}
    made = replica(tmp_path, **sizes)
    assert made.config.replica_ranks == ranks
    assert made.config.data_ranks == ranks // tensor


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"expert_parallel_size": 4}, "expert_parallel_size=4.*set it to 1, or data_parallel_size to 4"),
        ({"data_parallel_size": 2, "expert_parallel_size": 3}, "set it to 1 .* or 2 .*, or data_parallel_size to 3"),
        ({"name": "hf", **DEALT}, "rollout.name=hf does not deal experts out"),
        ({**DEALT, "enable_rollout_routing_replay": True}, "has not been tried with rollout.enable_rollout_routing"),
        ({**DEALT, "model": ADAPTERS}, "has not been tried with adapters"),
        ({**DEALT, "engine_kwargs": {"vllm": {"enable_expert_parallel": False}}}, "delete one of them"),
        ({"engine_kwargs": {"vllm": {"data_parallel_size": 2}}}, "decided by rollout.data_parallel_size"),
        ({"engine_kwargs": {"vllm": {"pipeline_parallel_size": 2}}}, "a replica has the ranks of"),
    ],
)
def test_what_a_replica_cannot_do_is_refused_with_the_key_that_decides(
    tmp_path: Path, config: dict[str, Any], said: str
):
    with pytest.raises(ConfigError, match=said):
        replica(tmp_path, **config)


@pytest.mark.parametrize("kind", ["gemma", "olmo"])
def test_models_that_have_not_been_tried_are_refused_where_bits_shall_be_the_same(tmp_path: Path, kind: str):
    path = make_tiny_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    with pytest.raises(ConfigError, match=f"rollout.exact=true has been tried with qwen2, .*, not with {kind}"):
        replica(path, exact=True)


def test_layers_that_do_not_attend_to_all_tokens_are_refused_where_bits_shall_be_the_same(tmp_path: Path):
    path = make_tiny_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None}
    (path / "config.json").write_text(json.dumps(config | sliding))
    with pytest.raises(ConfigError, match="rollout.exact=true attends to all tokens .* has sliding_attention"):
        replica(path, exact=True)
