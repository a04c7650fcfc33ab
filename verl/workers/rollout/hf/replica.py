"""The driver's side of a replica that runs plain transformers."""

from __future__ import annotations

from verl.utils.config import ConfigError
from verl.workers.rollout.base import RolloutReplica


class HFReplica(RolloutReplica):
    """One process, one model. Supports neither tensor parallelism nor sleep."""

    engine = "verl.workers.rollout.hf.engine:HFEngine"
    tells_experts_on = ("cpu", "cuda", "npu")

    def check_config(self) -> None:
        if self.config.tensor_model_parallel_size != 1:
            raise ConfigError(
                "rollout.name=hf runs on one rank; "
                f"set rollout.tensor_model_parallel_size=1, not {self.config.tensor_model_parallel_size}"
            )
        if self.config.engine_kwargs.get("hf"):
            raise ConfigError("rollout.name=hf takes no engine_kwargs")

    def env_vars(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1"} if self.device == "cpu" else {}
