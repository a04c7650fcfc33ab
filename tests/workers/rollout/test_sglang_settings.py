"""What an SGLang replica refuses on the driver, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sglang_on_cpu import SGLangOnCPU
from verl.utils.config import ConfigError
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.engine import EngineSpec
from verl.workers.rollout.sglang.room import kv_cache_tokens


def replica(path: Path, **config: Any) -> SGLangOnCPU:
    settings = RolloutConfig(name="sglang-on-cpu", max_model_len=64, **config)
    return SGLangOnCPU(replica_rank=0, config=settings, model=HFModelConfig(path=str(path)))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"tensor_model_parallel_size": 2}, "has been tried on one rank only"),
        ({"engine_kwargs": {"sglang": {"tp_size": 2}}}, "decided by rollout.tensor_model_parallel_size"),
        ({"engine_kwargs": {"sglang": {"custom_weight_loader": []}}}, "decided by the checkpoint engine"),
        ({"engine_kwargs": {"sglang": {"dp_size": 2}}}, "more of them are replicas"),
    ],
)
def test_what_a_replica_cannot_do_is_refused_with_the_key_that_decides(
    tmp_path: Path, config: dict[str, Any], said: str
):
    with pytest.raises(ConfigError, match=said):
        replica(tmp_path, **config)


def test_room_for_keys_and_values_is_counted_in_tokens(tiny_models: dict[int, Path]):
    def tokens(gib: float) -> int:
        spec = EngineSpec(
            name="replica-0",
            engine="",
            config=RolloutConfig(name="sglang", dtype="float32", cpu_kvcache_gib=gib),
            model=HFModelConfig(path=str(tiny_models[1])),
            device="cpu",
            max_model_len=64,
            seed=0,
        )
        return kv_cache_tokens(spec)

    per_token = 2 * 2 * 2 * 32 * 4  # keys and values, of 2 layers, 2 heads, 32 values of 4 bytes
    assert tokens(0.01) == int(0.01 * 2**30) // per_token
    with pytest.raises(ConfigError, match=r"cpu_kvcache_gib=1e-06 holds the keys and values of 1 tokens"):
        tokens(1e-6)
