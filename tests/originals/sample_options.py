"""How PyPI's verl's agent loops ask for samples: a list of (options of a run, whether it validates) comes in as JSON.

Run as a file with PyPI's verl in front. Prints, for each, the sampling parameters that a loop is given.
"""

import asyncio
import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

import verl
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.utils.config import omega_conf_to_dataclass

DEFAULTS = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml")


class Worker(AgentLoopWorker):  # type: ignore[misc]
    """Tells what it gives to its loop, and runs none."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.rollout_config = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        self.asked: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    async def _run_agent_loop(self, sampling_params: dict[str, Any], *_: Any, **__: Any) -> None:
        self.asked.append(sampling_params)

    def _postprocess(self, *_: Any, **__: Any) -> None:
        """There is nothing."""


def asked(options: dict[str, Any], validate: bool) -> dict[str, Any]:
    config = deepcopy(DEFAULTS)
    for key, value in {"actor_rollout_ref.rollout.name": "vllm", **options}.items():
        OmegaConf.update(config, key, value)
    worker = Worker(config)
    columns = {
        "raw_prompt": np.array([[{"role": "user", "content": "x"}], None], dtype=object)[:1],
        "index": np.arange(1),
        "agent_name": np.array(["single_turn_agent"], dtype=object),
    }
    told = {"do_sample": config.actor_rollout_ref.rollout.val_kwargs.do_sample} if validate else {}
    data = DataProto.from_dict({"row": torch.zeros(1, 1)}, columns, {"validate": validate, "global_steps": 1, **told})
    asyncio.run(worker.generate_sequences(data))
    (params,) = worker.asked
    return params


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps([asked(*case) for case in json.load(sys.stdin)]))
