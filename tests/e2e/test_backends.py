"""Every backend in every way to run, with vLLM on a node of its own.

Starting engines takes most of such a run, so there is one run per way, and the backend changes in the middle of it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from tests.checkpoint_engine.backends import PACKAGES, using
from tests.checkpoint_engine.fakes import soon
from tests.e2e.job import in_process
from tests.e2e.test_training import Run
from verl.checkpoint_engine.support import envs
from verl.experimental.fully_async_policy import fully_async_main
from verl.experimental.fully_async_policy.trainer import FullyAsyncTrainer
from verl.experimental.one_step_off_policy import main_ppo as one_step_off
from verl.experimental.one_step_off_policy.trainer import OneStepOffPolicyTrainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.step import Step

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.cells(6, by="way")]

STEPS = 2
"""With each backend."""
WAYS: dict[str, tuple[type[RayPPOTrainer], dict[str, Any], int]] = {
    "hybrid": (RayPPOTrainer, {}, 0),
    "one step off": (
        OneStepOffPolicyTrainer,
        {"config_path": one_step_off.CONFIG_DIR, "config_name": one_step_off.CONFIG_NAME},
        1,
    ),
    "fully asynchronous": (
        FullyAsyncTrainer,
        {
            "overrides": ("async_training.staleness_threshold=1", "async_training.trigger_parameter_sync_step=1"),
            "config_path": fully_async_main.CONFIG_DIR,
            "config_name": fully_async_main.CONFIG_NAME,
        },
        2,
    ),
}
"""The loop, its configuration, and how many versions old a sample may be when it is learnt from."""


def changing(trainer_class: type[RayPPOTrainer], backends: list[str]) -> type[RayPPOTrainer]:
    """A trainer that sends its first version with the first backend, and goes on to the next one every `STEPS`."""

    class Changing(trainer_class):  # type: ignore[misc,valid-type]
        def change(self, now: Step) -> None:
            if now.number > STEPS and now.number % STEPS == 1:
                backend = backends[(now.number - 1) // STEPS]
                self.cluster.rejoin(replace(self.config.checkpoint_engine, backend=backend))

        def update_weights(self, now: Step, generating: Any = None) -> None:
            self.change(now)
            super().update_weights(now, generating)

        def synchronise(self, now: Step) -> None:
            self.end_sync(now, version=now.number)
            self.change(now)
            super().synchronise(now)

    return Changing


@pytest.fixture(scope="module", params=WAYS)
def way(request, ray_cluster, tmp_path_factory):
    """One run: the backends in their order, the run, and how old its samples may be."""
    trainer_class, where, oldest = WAYS[request.param]
    where = dict(where)
    directory = tmp_path_factory.mktemp("backends")
    backends = [name for name in PACKAGES if not any(mark.args[0] for mark in using(name).marks)]
    overrides = where.pop("overrides", ())
    result = in_process(
        directory,
        *overrides,
        "trainer.placement=separate",
        f"trainer.total_training_steps={STEPS * len(backends)}",
        f"checkpoint_engine.backend={backends[0]}",
        "checkpoint_engine.retries=0",
        "data.train_max_samples=64",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "actor_rollout_ref.actor.entropy_coeff=0.01",  # weights change, also when all responses are equally good
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.cpu_kvcache_gib=0.1",
        trainer_class=changing(trainer_class, backends),
        **where,
    )
    return backends, Run(directory, result), oldest


def by_backend(way):
    backends, run, _ = way
    steps = range(1, STEPS * len(backends) + 1)
    return {backend: steps[index * STEPS : (index + 1) * STEPS] for index, backend in enumerate(backends)}, run


@pytest.mark.parametrize("backend", PACKAGES)
def test_every_version_is_committed_and_served(way, backend):
    steps, run = by_backend(way)
    if backend not in steps:
        pytest.skip(f"{backend} needs {', '.join(PACKAGES[backend])}")
    reports = {report["version"]: report for report in run.reports}
    for version in steps[backend]:
        report = reports[version]
        assert (report["backend"], report["outcome"], report["retries"]) == (backend, "committed", 0)
        assert report["replicas_updated"] == ["replica-0"]
        copies = 1 if backend == "naive" else 2  # into the trainer's copy, and to the node
        assert report["nbytes_moved"] == copies * report["nbytes_needed"] > 0
        assert 0 < report["paused_s"]["replica-0"] < report["total_s"]


@pytest.mark.parametrize("backend", PACKAGES)
def test_vllm_generates_with_the_weights_that_the_trainer_sent(way, backend):
    steps, run = by_backend(way)
    if backend not in steps:
        pytest.skip(f"{backend} needs {', '.join(PACKAGES[backend])}")
    for step in steps[backend]:
        metrics = run.metrics[step]
        assert metrics["training/rollout_probs_diff_mean"] < 0.02
        assert metrics["actor/grad_norm"] > 0
        assert 0 <= metrics["critic/rewards/mean"] <= 1
        assert 0 <= metrics["training/staleness/max"] <= way[2]


def test_nothing_is_left_of_the_nodes_that_were_replaced(way):
    assert soon(lambda: not list(envs.shm_dir().glob(f"verl-{os.getpid()}-*")))
