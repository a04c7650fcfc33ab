"""Metrics of the same training steps by this project, as `take_steps.py` gives verl's: {policy, critic, batches, runs}.

The trainer's `learn` and reports run, with one worker in this process in the place of a group; generation is what
`batches` say. Options of a run are ours. Run as a file with this project in front.
"""

import json
import sys
import tempfile
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl.protocol import DataProto, tensors_of
from verl.single_controller import RankInfo
from verl.trainer.config.loader import load_config
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.workers.critic import ActorCriticWorker
from verl.workers.reward_manager import RewardOutput


def worker_of(config: Any) -> Any:
    worker: Any = ActorCriticWorker.__new__(ActorCriticWorker)
    worker.rank_info = RankInfo(rank=0, world_size=1)
    worker.__init__(config.actor_rollout_ref, "actor_ref", critic=config.critic, device="cpu")
    worker.init_model()
    worker.init_critic()
    return worker


def cluster_of(worker: Any) -> Any:
    """A group of one rank, and no rollout engines."""
    of_all: Future[list[Any]] = Future()
    of_all.set_result([])
    actor = SimpleNamespace(
        world_size=1,
        compute_log_prob=worker.compute_log_prob,
        compute_ref_log_prob=worker.compute_ref_log_prob,
        compute_values=worker.compute_values,
        update_critic=lambda data: [worker.update_critic(data)],
        update_actor=lambda data: [worker.update_actor(data)],
        take_own_time=lambda: [worker.take_own_time()],
    )
    return SimpleNamespace(
        actor=actor,
        teachers=None,
        restarts=0,
        replicas=[],
        loop=None,
        trainer_ranks=SimpleNamespace(group=actor, restarts=0, loss=None, memory=None),
        recovery=SimpleNamespace(watch=lambda *_: None),
        begin_measure_engines=lambda: of_all,
    )


def scored(data: DataProto, _: Any) -> RewardOutput:
    return RewardOutput(reward_tensor=tensors_of(data).pop("rm_scores"), responses=[""] * len(data), extra_info={})


def steps(given: dict[str, Any], options: list[str]) -> list[dict[str, float]]:
    config = load_config(
        [
            f"actor_rollout_ref.model.path={given['policy']}",
            f"critic.model.path={given['critic']}",
            *(f"actor_rollout_ref.{part}.fsdp_config.dtype=float32" for part in ("actor", "ref")),
            "critic.fsdp.dtype=float32",
            f"trainer.default_local_dir={tempfile.mkdtemp()}",
            *options,
        ]
    )
    cluster = cluster_of(worker_of(config))
    trainer = RayPPOTrainer(
        config=config,
        cluster=cluster,
        rollouts=None,
        reward_manager=scored,
        train_dataloader=[None] * len(given["batches"]),
        validator=None,
        checkpoints=SimpleNamespace(keeps_all=False),
        tracking=SimpleNamespace(show_phase=lambda text: None),
        total_steps=len(given["batches"]),
    )
    found = []
    for number, rows in enumerate(given["batches"], start=1):
        tensors = {name: torch.tensor(values) for name, values in rows.items()}
        count = len(tensors["responses"])
        columns = {
            "uid": np.array([str(row // config.actor_rollout_ref.rollout.n) for row in range(count)], dtype=object),
            "data_source": np.array(["s"] * count, dtype=object),
            "__num_turns__": np.array([2] * count, dtype=np.int32),
        }
        now = trainer.at(number)
        with now.timed("step"):
            with now.timed("gen"):
                batch = DataProto.from_dict(tensors, columns, {"global_steps": number})
            batch = trainer.learn(batch, now)
            with now.timed("update_weights"):
                pass
        found.append(now.metrics | trainer.reports.metrics(batch, now, epoch=0))
    return found


if __name__ == "__main__":
    given = json.load(sys.stdin)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    runs = given["batches"], given["runs"]
    sys.stdout.write("\n" + json.dumps([steps({**given, "batches": of}, run) for of, run in zip(*runs, strict=True)]))
