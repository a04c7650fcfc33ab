"""One run of `main_ppo` from configuration to summary: check, build, start, train, end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from verl.checkpoint_engine.plan.types import SyncReport
from verl.checkpoint_engine.support.files import keep_private
from verl.trainer.config.record import record_run
from verl.trainer.fleet.cluster import Cluster
from verl.trainer.fleet.reward_models import AwakeForScoring
from verl.trainer.fleet.starting import Starting
from verl.trainer.output_lock import only_run_in
from verl.trainer.ppo.generation import HealingRollouts
from verl.trainer.ppo.job import Job, checked_job
from verl.trainer.ppo.needs import needs_reference
from verl.trainer.ppo.overview import in_force, lines
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, TrainingResult
from verl.trainer.ppo.settled import settled
from verl.trainer.ppo.validation import Validator
from verl.trainer.telemetry import sync_spans
from verl.utils.config import to_mapping
from verl.utils.console import print_summary
from verl.utils.tracking import Tracking
from verl.workers.config import PPOConfig
from verl.workers.reward_manager import RewardManager

if TYPE_CHECKING:
    from verl.trainer.metrics_server import MetricsServer

logger = logging.getLogger(__name__)


def train(
    config: PPOConfig, trainer_class: type[RayPPOTrainer] = RayPPOTrainer, starting: Starting | None = None
) -> TrainingResult:
    """One run with the loop of `trainer_class`. `starting` has what has been started of it.

    Raises ConfigError for what the user has to change: before any process starts if this host can check it, else before
    any weights are loaded if the Ray cluster has to."""
    began = time.perf_counter()
    keep_private(config.trainer.files_for)
    given, starting = config, starting or Starting()
    with starting.during("checks"):
        job = checked_job(settled(trainer_class.adapted(config)), trainer_class)
    for line in in_force(job.config, job.device):
        logger.info("%s", line)
    with (
        _own_directory(job, given),
        _metrics_server(job) as server,
        sync_spans() as spans,
        _tracking(job, server) as tracking,
        _scoring(job) as reward_manager,
        _cluster(job, [each.synced for each in (server, spans) if each is not None], starting) as cluster,
        _agent_loops(job, cluster, starting) as manager,
    ):
        cluster.connect()
        logger.info("started in %s", starting)
        rollouts = HealingRollouts(manager, lambda: cluster.server_handles, cluster.recovery)
        trainer = trainer_class(
            config=job.config,
            cluster=cluster,
            rollouts=rollouts,
            reward_manager=reward_manager,
            train_dataloader=job.loaders["train"],
            validator=Validator(
                config=job.config,
                rollouts=rollouts,
                reward_manager=reward_manager,
                dataloader=job.loaders["val"],
                show=tracking.log_samples,
            ),
            checkpoints=job.checkpoints,
            tracking=tracking,
            total_steps=job.total_steps,
        )
        result = trainer.fit(job.resume_from)
    _summarise(result, job.output_dir, time.perf_counter() - began)
    return result


@contextmanager
def _own_directory(job: Job, given: PPOConfig) -> Iterator[None]:
    """No other run writes to it meanwhile; it says what this one is."""
    with only_run_in(job.output_dir):
        record_run(
            job.output_dir,
            given,
            overview=list(lines(job.config, job.device, job.total_steps, job.resume_from)),
            total_steps=job.total_steps,
            resumed_from=job.resume_from,
            tokenizer=job.config.actor_rollout_ref.model.tokenizer_path or job.model_path,
        )
        yield


def _scoring(job: Job) -> RewardManager:
    return job.reward_manager if job.reward_models is None else AwakeForScoring(job.reward_manager, job.reward_models)


def _metrics_server(job: Job) -> AbstractContextManager[MetricsServer | None]:
    trainer = job.config.trainer
    if trainer.metrics_port is None:
        return nullcontext()
    from verl.trainer.metrics_server import MetricsServer  # needs prometheus_client

    server = MetricsServer(trainer.metrics_port, trainer.metrics_host)
    logger.info("metrics for Prometheus: http://%s:%d/metrics", trainer.metrics_host, server.port)
    return server


def _tracking(job: Job, server: MetricsServer | None) -> Tracking:
    trainer = job.config.trainer
    return Tracking(
        trainer.project_name,
        trainer.experiment_name,
        trainer.logger,
        job.output_dir,
        to_mapping(job.config),
        total_steps=job.total_steps,
        resume_step=job.checkpoints.read(job.resume_from).step if job.resume_from else 0,
        also=[server] if server is not None else [],
    )


def _cluster(job: Job, on_sync: Sequence[Callable[[SyncReport], None]], starting: Starting) -> Cluster:
    return Cluster(
        job.config,
        model_path=job.model_path,
        device=job.device,
        replicas=job.replicas,
        arena_nbytes=job.arena_nbytes,
        with_reference=needs_reference(job.config),
        critic=job.critic,
        reward_models=job.reward_models,
        teachers=job.teachers,
        on_sync=on_sync,
        fewer_ranks=job.fewer_ranks,
        starting=starting,
    )


def _agent_loops(job: Job, cluster: Cluster, starting: Starting) -> Any:
    tokenizer_path = job.config.actor_rollout_ref.model.tokenizer_path or job.model_path
    with starting.during("agent loops"):
        return job.agent_loop_manager_class(job.config, cluster.server_handles, tokenizer_path)


def _summarise(result: TrainingResult, output_dir: Path, seconds: float) -> None:
    names = ("metrics.jsonl", "sync_reports.jsonl", "tensorboard", f"global_step_{result.step}")
    artefacts = {name: output_dir / name for name in names if (output_dir / name).exists()}
    print_summary(result.rewards_before, result.rewards_after, artefacts)
    logger.info(
        "%d steps in %.0f s; to look at them: verl-sync report %s", result.step, seconds, quote(str(output_dir))
    )
