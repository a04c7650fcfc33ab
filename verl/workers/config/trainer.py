"""The `trainer` and `ray_kwargs` sections, and the root of the whole configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.support.files import READERS
from verl.utils.config import ConfigError, option, section
from verl.workers.config.actor import ActorConfig, RefConfig
from verl.workers.config.algorithm import AlgorithmConfig, CustomRewardFunctionConfig, RewardModelConfig
from verl.workers.config.async_training import AsyncTrainingConfig
from verl.workers.config.critic import CriticConfig
from verl.workers.config.data import DataConfig
from verl.workers.config.distillation import DistillationConfig
from verl.workers.config.model import HFModelConfig
from verl.workers.config.profiler import GlobalProfilerConfig
from verl.workers.config.rollout import RolloutConfig

LOGGERS = ("console", "jsonl", "tensorboard", "wandb", "swanlab", "mlflow", "trackio", "clearml")
DEVICES = ("cpu", "cuda", "npu")


@dataclass(frozen=True, kw_only=True)
class ActorRolloutRefConfig:
    """The policy: one model, trained by the actor, sampled by the rollout engine, compared with the reference."""

    hybrid_engine: bool = option(
        True, "false only says again that they are apart (trainer.placement=separate), as verl's scripts do"
    )
    model: HFModelConfig = section(HFModelConfig)
    actor: ActorConfig = section(ActorConfig)
    ref: RefConfig = section(RefConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    nccl_timeout: float = option(600.0, "deadline for a collective of the trainer ranks, on any device, in s", above=0)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The run: length, machines, logging, checkpoints."""

    total_epochs: int = option(30, "passes over the training data", least=1)
    total_training_steps: int | None = option(
        None, "stop after this many steps; null: total_epochs, or 30 steps of a built-in data set", least=1
    )
    project_name: str = option("verl_sync", "name of the project in logs and paths")
    experiment_name: str = option("default", "name of the run in logs and paths")
    logger: list[str] = option(["console", "jsonl", "tensorboard"], f"any of {', '.join(LOGGERS)}")
    nnodes: int = option(1, "machines of the trainer", least=1)
    n_gpus_per_node: int = option(2, "trainer ranks per machine, on any device (verl: 8)", least=1)
    placement: str = option(
        "colocated",
        "rollout engines share the trainer's machines and devices, or have their own (rollout.nnodes)",
        choices=("colocated", "separate"),
    )
    device: str | None = option(None, "cpu, cuda or npu; null: what is there", choices=(None, *DEVICES))
    seed: int = option(1, "seed of parameter initialisation, data order and sampling", least=0, below=2**32)
    full_determinism: bool = option(
        False,
        "two runs with the same settings on the same hardware compute the same bits, also when one is resumed or loses "
        "trainer ranks (cpu; see docs/compare_runs.md); what cannot be is refused",
    )
    val_before_train: bool = option(True, "validate before the first step")
    val_only: bool = option(False, "validate and stop")
    test_freq: int = option(
        10,
        "validate every so many steps, and at the end; -1: only at the end; null: 10 with a built-in model and "
        "built-in data, else verl's -1",
        least=-1,
        follows=True,
    )
    save_freq: int = option(-1, "checkpoint every so many steps, and at the end; -1: never", least=-1)
    max_actor_ckpt_to_keep: int | None = option(None, "older checkpoints are deleted; null: keep all", least=1)
    max_skipped_steps: int = option(
        3,
        "a run ends with an error after so many steps in a row in which an update was left out because gradients were "
        "not finite; from the first of them on no checkpoint is deleted",
        least=1,
    )
    on_full_disk: str = option(
        "go_on",
        "a checkpoint for which there is no space: go on and try again at the next save, or stop the run",
        choices=("go_on", "stop"),
    )
    resume_mode: str = option(
        "auto",
        "continue from the last checkpoint, never, or from resume_from_path",
        choices=("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = option(None, "a global_step_N directory")
    resume_fallback: bool = option(
        False,
        "where the last checkpoint is damaged, go on from the newest whole one, with a warning (resume_mode=auto)",
    )
    default_local_dir: str | None = option(None, "output directory; null: checkpoints/<project_name>/<experiment_name>")
    critic_warmup: int = option(0, "first steps, in which only the critic learns", least=0)
    balance_batch: bool = option(True, "give every rank about the same number of tokens")
    log_val_generations: int = option(
        0, "validation samples shown on the console and in services; 0: one on the console", least=0
    )
    show_samples_freq: int = option(
        10, "show a training sample on the console every so many steps; -1: never", least=-1
    )
    files_for: str = option(
        "user", "who may read what a run writes: its user alone, the group, too, or everyone", choices=tuple(READERS)
    )
    rollout_data_dir: str | None = option(None, "JSONL files with every training sample")
    mismatch_probe_freq: int = option(
        -1,
        "of every so many versions of the weights, keep the sequence on which engine and trainer agree least, below "
        "default_local_dir, for verl-sync mismatch; -1: never",
        least=-1,
    )
    validation_data_dir: str | None = option(None, "JSONL files with every validation sample")
    metrics_port: int | None = option(
        None, "port of the driver from which Prometheus scrapes; 0: any that is free; null: none", least=0, most=65535
    )
    metrics_host: str = option(
        "127.0.0.1", "address at which that port listens; every client that reaches it reads metrics"
    )
    num_cpus_per_rank: float = option(0.4, "Ray CPUs of one trainer rank", least=0)
    max_restarts: int = option(
        3,
        "how often lost trainer ranks are started again within restart_window_s, before the run ends; 0: it ends",
        least=0,
    )
    restart_window_s: float = option(3600.0, "seconds over which max_restarts counts", above=0)
    restart_wait_s: float = option(
        300.0,
        "seconds that restarted ranks wait for CPUs and devices, and a run without rollout machines for a machine",
        above=0,
    )
    min_ranks: int | None = option(
        None,
        "smallest number of ranks with which the trainer continues if some have no place after restart_wait_s; "
        "null: all",
        least=1,
    )
    warm_workers: str = option(
        "auto",
        "processes start as forks of one that has imported torch, transformers and vLLM; auto: on cpu, in a Ray of the "
        "run with no runtime_env",
        choices=("auto", "off"),
    )
    memory_checkpoint: str = option(
        "auto",
        "keep the training state of the last step in host memory, for ranks that are started again: twice its size, on "
        "several hosts with parity; auto: if that is at most half of what is free",
        choices=("auto", "off"),
    )

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.logger) - set(LOGGERS)):
            raise ConfigError(f"trainer.logger: unknown {unknown}; known: {', '.join(LOGGERS)}")
        for key in ("project_name", "experiment_name"):
            if {"", ".", ".."} & set((name := getattr(self, key)).split("/")):
                raise ConfigError(f"trainer.{key}={name!r} is a part of the output directory: give it a name")
        if self.default_local_dir == "":
            raise ConfigError("trainer.default_local_dir='' is no directory: name one, or leave it null")
        if self.resume_mode == "resume_path" and not self.resume_from_path:
            raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path")
        if self.resume_from_path and self.resume_mode != "resume_path":
            raise ConfigError(
                f"trainer.resume_from_path={self.resume_from_path} needs trainer.resume_mode=resume_path, "
                f"not {self.resume_mode}"
            )

    @property
    def output_dir(self) -> str:
        return self.default_local_dir or f"checkpoints/{self.project_name}/{self.experiment_name}"

    @property
    def world_size(self) -> int:
        return self.nnodes * self.n_gpus_per_node

    @property
    def fewer_ranks(self) -> list[tuple[int, int]]:
        """(hosts, ranks on each) for fewer ranks, at least `min_ranks`, in descending order.

        Whole hosts leave before ranks of the last host do.
        """
        if self.min_ranks is None:
            return []
        hosts = [(count, self.n_gpus_per_node) for count in range(self.nnodes - 1, 0, -1)]
        alone = [(1, count) for count in range(self.n_gpus_per_node - 1, 0, -1)]
        return [(count, each) for count, each in hosts + alone if count * each >= self.min_ranks]


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """How Ray is started."""

    ray_init: dict[str, Any] = option(
        {}, "arguments of ray.init, for example num_cpus; address: RAY_ADDRESS, if that is set, else local"
    )
    timeline_json_file: str | None = option(None, "write Ray's timeline here at the end")


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Everything that `python -m verl.trainer.main_ppo` understands."""

    data: DataConfig = section(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig)
    reward_model: RewardModelConfig = section(RewardModelConfig)
    distillation: DistillationConfig = section(DistillationConfig)
    checkpoint_engine: CheckpointEngineConfig = section(CheckpointEngineConfig)
    async_training: AsyncTrainingConfig = section(AsyncTrainingConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    global_profiler: GlobalProfilerConfig = section(GlobalProfilerConfig)
    ray_kwargs: RayConfig = section(RayConfig)

    @property
    def profile_directory(self) -> str:
        """The directory of trainer ranks' traces, on the machine of each rank."""
        return str(Path(self.global_profiler.save_path or Path(self.trainer.output_dir) / "profile").absolute())
