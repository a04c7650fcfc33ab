"""`python -m tests.weight_sync.driver <model> <output directory>`: a whole cluster that serves, until it is killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from verl.trainer.ppo.cluster import Cluster
from verl.utils.config import from_mapping
from verl.workers.config import PPOConfig


def main() -> None:
    model_path, output_dir = Path(sys.argv[1]), sys.argv[2]
    config = from_mapping(
        PPOConfig,
        {
            "actor_rollout_ref": {
                "actor": {"ppo_mini_batch_size": 2},
                "rollout": {"name": "hf", "n": 1, "max_model_len": 128},
            },
            "trainer": {"default_local_dir": output_dir},
            "ray_kwargs": {"ray_init": {"num_cpus": 4, "object_store_memory": 2**28, "log_to_driver": False}},
        },
    )
    with Cluster(config, model_path=model_path, device="cpu", with_reference=False) as cluster:
        cluster.update_weights(1)
        sys.stdout.write("serving\n")
        sys.stdout.flush()
        time.sleep(600)


if __name__ == "__main__":
    main()
