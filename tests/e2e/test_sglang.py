"""A policy that generates with SGLang: what it samples from is what the trainer has.

One step off policy has run, too; for the engine it is between these two.
"""

from __future__ import annotations

import pytest

from tests.e2e.job import in_process
from tests.e2e.test_backends import WAYS
from tests.e2e.test_training import Run
from tests.sglang_on_cpu import NEEDS_SGLANG

pytestmark = [pytest.mark.e2e, pytest.mark.sglang, NEEDS_SGLANG]

STEPS = 3


@pytest.fixture(scope="module", params=["hybrid", "fully asynchronous"])
def way(request, ray_cluster, tmp_path_factory):
    """A run, and how many versions old its samples may be."""
    trainer_class, where, oldest = WAYS[request.param]
    where = dict(where)
    directory = tmp_path_factory.mktemp("sglang")
    overrides = where.pop("overrides", ())
    result = in_process(
        directory,
        *overrides,
        f"trainer.total_training_steps={STEPS}",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.actor.entropy_coeff=0.01",  # weights change, also when all responses are equally good
        "actor_rollout_ref.rollout.name=sglang-on-cpu",
        "actor_rollout_ref.rollout.cpu_kvcache_gib=0.1",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "checkpoint_engine.check_engine=always",
        trainer_class=trainer_class,
        **where,
    )
    return Run(directory, result), oldest


def test_every_version_is_committed_and_checked_by_the_engine(way):
    run, _ = way
    versions = {report["version"]: report for report in run.reports}
    assert versions.keys() >= set(range(1, STEPS + 1))
    for report in versions.values():
        assert (report["outcome"], report["replicas_updated"]) == ("committed", ["replica-0"])
        assert report["engine_checks"]["replica-0"]["found"].startswith("every value of the model came from")


def test_sglang_generates_with_the_weights_that_the_trainer_sent(way):
    run, oldest = way
    for step in range(1, STEPS + 1):
        metrics = run.metrics[step]
        assert metrics["actor/grad_norm"] > 0
        assert 0 <= metrics["training/staleness/max"] <= oldest
        if metrics["training/staleness/max"] == 0:
            assert metrics["training/rollout_probs_diff_max"] < 1e-3
