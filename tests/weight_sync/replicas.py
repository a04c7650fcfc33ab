"""Replicas whose insides tests can see."""

from __future__ import annotations

from pathlib import Path

import torch

from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.vllm.replica import VLLMReplica


def served_weights_file(directory: Path, version: int, rank: int) -> Path:
    return directory / f"version-{version}-rank-{rank}.pt"


def pid_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.pid"


class InspectedVLLMReplica(VLLMReplica):
    """A real vLLM replica that writes what each of its ranks computes with into `directory`, once per activation."""

    engine = "tests.weight_sync.inspected_engine:InspectedVLLMEngine"

    def __init__(
        self, replica_rank: int, model: Path, directory: Path, *, dtype: str, ranks: int, data_ranks: int = 1
    ) -> None:
        self.directory = directory
        self.directory.mkdir()
        super().__init__(
            replica_rank=replica_rank,
            config=RolloutConfig(
                name="vllm",
                dtype=dtype,
                tensor_model_parallel_size=ranks,
                data_parallel_size=data_ranks,
                expert_parallel_size=ranks * data_ranks if data_ranks > 1 else 1,
                max_model_len=256,
                cpu_kvcache_gib=0.1,
                num_cpus=0.1,
                control_timeout_s=300,
                engine_kwargs={
                    "vllm": {
                        "worker_extension_cls": "tests.weight_sync.inspected_engine.ServedWeights",
                        "additional_config": {"served_weights": str(directory)},
                    }
                },
            ),
            model=HFModelConfig(path=str(model)),
        )

    def check_config(self) -> None:
        """The check of `engine_kwargs.vllm` would import vLLM into the test process."""

    def served_weights(self, version: int) -> list[dict[str, torch.Tensor]]:
        """By rank. Asked for once: the next trainer of this engine counts versions from 1 again.

        Raises FileNotFoundError for a version that was never activated.
        """
        ranks = range(self.config.replica_ranks)
        files = [served_weights_file(self.directory, version, rank) for rank in ranks]
        weights = [torch.load(file) for file in files]
        for file in files:
            file.unlink()
        return weights

    def worker_pid(self, rank: int) -> int:
        """Of the process that activated a version last."""
        return int(pid_file(self.directory, rank).read_text())
