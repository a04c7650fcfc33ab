"""Metrics of the same training steps by this project, as `take_steps.py` gives verl's: {policy, critic, ranks, batches,
runs}.

The trainer's `learn` and reports run, with a process for each rank in the place of Ray's; generation is what `batches`
say. Options of a run are ours. Run as a file with this project in front.
"""

import json
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from ranks import Ranks

from verl.protocol import DataProto, tensors_of
from verl.single_controller import RankInfo
from verl.single_controller.dispatch import plan, registrations
from verl.trainer.config.loader import load_config
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.workers.critic import ActorCriticWorker
from verl.workers.reward_manager import RewardOutput

WORKERS: list[Any] = []
"""Of this rank, the last is that of this run."""


def create(config: Any, info: RankInfo) -> None:
    worker: Any = ActorCriticWorker.__new__(ActorCriticWorker)
    worker.rank_info = info
    policy, correction = config.actor_rollout_ref, config.algorithm.rollout_correction
    given = {"correction": correction if policy.actor.use_rollout_log_probs else None, "seed": config.trainer.seed}
    worker.__init__(policy, "actor_ref", critic=config.critic, device="cpu", **given)
    worker.init_model()
    worker.init_critic()
    WORKERS[:] = [worker]


def keep(role: str, folder: str) -> None:
    getattr(WORKERS[0], role).export_hf(Path(folder), "float32")


def call(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return getattr(WORKERS[0], name)(*args, **options)


class Group:
    """Deals out batches as `RayWorkerGroup` does."""

    def __init__(self, ranks: Ranks, config: Any) -> None:
        self._ranks, self.world_size = ranks, ranks.count
        self.processes = [SimpleNamespace(pid=0, address="here")] * ranks.count
        infos = [RankInfo(rank=rank, world_size=ranks.count) for rank in range(ranks.count)]
        ranks.call(create, [(config, info) for info in infos])

    def __getattr__(self, name: str) -> Any:
        mode = registrations(ActorCriticWorker)[name].dispatch_mode

        def method(*args: Any, **options: Any) -> Any:
            planned = plan(mode, args, options, world_size=self.world_size, label=name)
            return planned.collect(self._ranks.call(call, [(name, *planned.calls[rank]) for rank in planned.calls]))

        return method


def cluster_of(actor: Group) -> Any:
    """No rollout engines."""
    of_all: Future[list[Any]] = Future()
    of_all.set_result([])
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


def steps(given: dict[str, Any], options: list[str], ranks: Ranks, folder: Path) -> list[dict[str, float]]:
    config = load_config(
        [
            f"actor_rollout_ref.model.path={given['policy']}",
            f"critic.model.path={given['critic']}",
            *(f"actor_rollout_ref.{part}.fsdp_config.dtype=float32" for part in ("actor", "ref")),
            "critic.fsdp.dtype=float32",
            f"trainer.n_gpus_per_node={ranks.count}",
            f"trainer.default_local_dir={tempfile.mkdtemp()}",
            *options,
        ]
    )
    cluster = cluster_of(Group(ranks, config))
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
    for role in ("actor", *["critic"] * trainer.has_critic):
        ranks.call(keep, [(role, str(folder / role))] * ranks.count)
    return found


def main() -> list[Any]:
    given = json.load(sys.stdin)
    ranks = Ranks(given.get("ranks", 1))
    found = []
    for number, options in enumerate(given["runs"]):
        folder = Path(given["policy"], f"ours-{number}")
        folder.mkdir()
        found.append(steps({**given, "batches": given["batches"][number]}, options, ranks, folder))
    return found


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main()))
