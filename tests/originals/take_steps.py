"""Metrics of whole training steps by PyPI's verl on the CPU: {policy, critic, ranks, batches, runs} comes in.

A run is options of verl's configuration by their names; each of its `batches` is learned from in a step. verl's own
loop (`fit`) runs, and its workers, with FSDP2 over gloo, a process for each rank; generation is what `batches` say. Run
as a file with PyPI's verl in front. Prints a list of runs, each a list of the steps' metrics.
"""

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import verl.utils.ray_utils
from cpu_platform import use_cpu
from omegaconf import OmegaConf
from ranks import Ranks, save
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import value_loss

import verl
from verl.protocol import DataProto
from verl.single_controller.base.worker_group import ResourcePool, WorkerGroup
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, TrainingWorkerConfig

DEFAULTS = Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"


WORKERS: dict[str, Any] = {}
"""Of this rank, by role."""


def create(role: str, make: Any, *arguments: Any) -> None:
    WORKERS[role] = make(*arguments)


def keep(role: str, file: str) -> None:
    worker = WORKERS[role]
    save((worker.actor if role == "actor" else worker).engine.module, file)


def call(role: str, name: str, args: list[Any], options: dict[str, Any]) -> Any:
    return getattr(WORKERS[role], name)(*args, **options)


class Group(WorkerGroup):
    """verl's group of workers, whose methods deal out batches among ranks; Ray is left out."""

    def __init__(self, ranks: Ranks, role: str, cls: type, make: Any, *arguments: Any) -> None:
        super().__init__(ResourcePool([ranks.count]))
        self._ranks, self._role = ranks, role
        ranks.call(create, [(role, make, *arguments)] * ranks.count)
        self._bind_worker_method(cls, self.bound)

    @property
    def world_size(self) -> int:
        return self._ranks.count

    def execute_all(self, name: str, *args: Any, **options: Any) -> list[Any]:
        """An argument is a list with the value of each rank."""
        calls = [
            (self._role, name, [each[rank] for each in args], {key: each[rank] for key, each in options.items()})
            for rank in range(self.world_size)
        ]
        return self._ranks.call(call, calls)

    execute_rank_zero = execute_all

    @staticmethod
    def bound(group: Any, method_name: str, dispatch_fn: Any, collect_fn: Any, execute_fn: Any, blocking: bool) -> Any:
        def method(*args: Any, **options: Any) -> Any:
            args, options = dispatch_fn(group, *args, **options)
            found = collect_fn(group, execute_fn(method_name, *args, **options))
            return found if blocking else SimpleNamespace(get=lambda: found)

        return method


class Nothing:
    """Does whatever it is asked to: nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Rollouts:
    def __init__(self, batches: list[dict[str, Any]]) -> None:
        self._left = [{name: torch.tensor(rows) for name, rows in batch.items()} for batch in batches]

    def generate_sequences(self, _: DataProto) -> DataProto:
        tensors = self._left.pop(0)
        rows = len(tensors["responses"])
        columns = {
            "multi_modal_inputs": np.array([{} for _ in range(rows)], dtype=object),
            "__num_turns__": np.array([2] * rows, dtype=np.int32),
        }
        return DataProto.from_dict(tensors, columns, {"timing": {}, "reward_extra_keys": []})


def configured(given: dict[str, Any], options: dict[str, Any]) -> Any:
    config = OmegaConf.load(DEFAULTS)
    policy, critic = given["policy"], given["critic"]
    model = {"use_remove_padding": False, "enable_gradient_checkpointing": False}
    eager = {"attn_implementation": "eager"}
    of_shards = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    exact = {"dtype": "float32", "mixed_precision": of_shards}  # shards are bfloat16, whatever `dtype` says
    micro = {"log_prob_micro_batch_size_per_gpu": 2}
    every = {
        "actor_rollout_ref.model": {"path": policy, "override_config": eager, **model},
        "actor_rollout_ref.actor": {"strategy": "fsdp2", "ppo_micro_batch_size_per_gpu": 2, "use_torch_compile": False},
        "actor_rollout_ref.actor.fsdp_config": exact,
        "actor_rollout_ref.ref": {"strategy": "fsdp2", "fsdp_config": exact, **micro},
        "actor_rollout_ref.rollout": {"calculate_log_probs": True, **micro},
        "critic": {"strategy": "fsdp2", "ppo_micro_batch_size_per_gpu": 2, "fsdp": exact},
        "critic.model": {"path": critic, "override_config": eager, **model},
        "trainer": {"logger": ["file"], "total_epochs": 1, "val_before_train": False, "test_freq": -1, "save_freq": -1},
        "trainer.n_gpus_per_node": given.get("ranks", 1),
    }
    for key, value in (every | options).items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def actor_worker(config: Any, role: str) -> Any:
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role=role)
    worker.init_model()
    return worker


def critic_worker(config: Any) -> Any:
    critic = omega_conf_to_dataclass(config.critic)
    model = {key: config.critic.model[key] for key in ("path", "use_remove_padding", "enable_gradient_checkpointing")}
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model",
            model_config=HFModelConfig(**model, load_tokenizer=False, model_type="value_model"),
            engine_config=replace(
                critic.fsdp,
                max_token_len_per_gpu=critic.ppo_max_token_len_per_gpu,
                infer_max_token_len_per_gpu=critic.forward_max_token_len_per_gpu,
            ),
            optimizer_config=critic.optim,
            checkpoint_config=critic.checkpoint,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(value_loss, config=critic))
    return worker


def steps(given: dict[str, Any], options: dict[str, Any], ranks: Ranks, log: Path) -> list[dict[str, float]]:
    class Trainer(RayPPOTrainer):
        """Its loop; what it starts, and what is asked for that is not here, are left out."""

        def __init__(self, **parts: Any) -> None:
            vars(self).update(parts)

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    config = configured(given, options)
    prompts = config.data.train_batch_size
    row = {
        "raw_prompt": np.array([[{"role": "user"}] for _ in range(prompts)] + [None], dtype=object)[:prompts],
        "data_source": np.array(["s"] * prompts, dtype=object),
        "dummy_tensor": torch.zeros(prompts, 1),
    }
    left_out = ("load_checkpoint", "save_checkpoint", "start_profiling", "stop_profiling", "validate")
    has_critic = config.algorithm.adv_estimator == "gae"
    Trainer(
        **{f"_{name}": lambda *_, **__: None for name in (*left_out, "init_dump_executor", "shutdown_dump_executor")},
        config=config,
        actor_rollout_wg=Group(ranks, "actor", ActorRolloutRefWorker, actor_worker, config, "actor"),
        ref_policy_wg=Group(ranks, "ref", ActorRolloutRefWorker, actor_worker, config, "ref"),
        critic_wg=Group(ranks, "critic", TrainingWorker, critic_worker, config) if has_critic else None,
        ref_in_actor=False,
        use_reference_policy=True,
        use_rm=False,
        use_critic=has_critic,
        async_rollout_manager=Rollouts(given["batches"]),
        checkpoint_manager=Nothing(),
        llm_server_manager=Nothing(),
        resource_pool_manager=SimpleNamespace(get_n_gpus=lambda: ranks.count),
        total_training_steps=len(given["batches"]),
        train_dataloader=[row] * len(given["batches"]),
        train_dataset=object(),
        kl_ctrl_in_reward=core_algos.get_kl_controller(config.algorithm.kl_ctrl),
        _dump_executor=SimpleNamespace(_shutdown=False),
    ).fit()
    for role in ("actor", *["critic"] * has_critic):
        ranks.call(keep, [(role, str(log.with_name(f"{role}.pt")))] * ranks.count)
    return [json.loads(line)["data"] for line in log.read_text().splitlines()]


def main() -> list[Any]:
    given = json.load(sys.stdin)
    use_cpu()
    verl.utils.ray_utils.parallel_put = lambda data, *_, **__: data  # into Ray's store
    ranks = Ranks(given.get("ranks", 1))
    found = []
    for number, options in enumerate(given["runs"]):
        log = Path(given["policy"], f"verls-{number}", "steps.jsonl")
        log.parent.mkdir()
        os.environ["VERL_FILE_LOGGER_PATH"] = str(log)
        found.append(steps({**given, "batches": given["batches"][number]}, options, ranks, log))
    return found


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main()))
