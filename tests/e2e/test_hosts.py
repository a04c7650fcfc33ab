"""A whole run on three hosts that share nothing but a network and, because they are namespaces, the file system."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.checkpoint_engine.backends import using
from tests.checkpoint_engine.fakes import soon
from tests.e2e.hosts import NOTICES_SOON, RUN_S, Run, hosts_with_ray

pytestmark = [pytest.mark.e2e, pytest.mark.cells(4)]

STEPS = 2


@contextlib.contextmanager
def running(model: Path, output_dir: Path, *overrides: str, ray: Mapping[str, str] | None = None) -> Iterator[Run]:
    """Both trainer ranks on one host, a rollout node on each of the others. `ray`: of its environment."""
    where = "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.nnodes=2"
    with hosts_with_ray(3, ray=ray) as cluster, cluster.running(model, output_dir, *where, *overrides) as run:
        yield run


@pytest.mark.parametrize("backend", [using("mooncake")])
def test_a_run_across_hosts_reaches_every_engine_along_a_chain(backend: str, tiny_model: Path, tmp_path: Path):
    overrides = f"checkpoint_engine.backend={backend}", f"trainer.total_training_steps={STEPS}"
    with running(tiny_model, tmp_path, *overrides) as run:
        before = [host.received_nbytes for host in run.hosts]
        assert "checkpoint_engine.topology=chain" in run.output()
        received = [host.received_nbytes - start for host, start in zip(run.hosts, before, strict=True)]
    assert [report["outcome"] for report in run.reports] == ["committed"] * (STEPS + 1)
    assert run.reports[-1]["replicas_updated"] == ["replica-0", "replica-1"]
    assert run.metrics[-1]["training/rollout_probs_diff_max"] < 1e-3
    # Ray chose the host of the trainer ranks. Each of the other two has a rollout node, which needs half of the bytes.
    assert sorted(received)[1] > sum(report["nbytes_needed"] for report in run.reports) / 2


def test_a_run_goes_on_when_a_host_with_rollouts_is_cut_off(tiny_model: Path, tmp_path: Path):
    steps = 4
    overrides = (
        "checkpoint_engine.backend=gloo",
        "actor_rollout_ref.actor.ppo_epochs=20",  # a second: the run is not over before the host is cut off
        "checkpoint_engine.deadlines.publish_s=100",
        "checkpoint_engine.deadlines.prepare_s=100",
        f"trainer.total_training_steps={steps}",
    )
    with running(tiny_model, tmp_path, *overrides, ray=NOTICES_SOON) as run:
        assert soon((tmp_path / "sync_reports.jsonl").exists, RUN_S), run.said.read_text()
        lost = run.hosts_with("ray::CheckpointEngineWorker")[-1]
        assert lost is not run.hosts[0]
        lost.cut_off()
        output = run.output()
    assert f"{lost.address} is lost; the run goes on without node-" in output
    committed = [report for report in run.reports if report["outcome"] == "committed"]
    assert [report["version"] for report in committed] == list(range(steps + 1))
    assert len(committed[0]["replicas_updated"]) == 2
    assert len(committed[-1]["replicas_updated"]) == 1
    assert [len(run.metrics), run.metrics[-1]["rollout/replicas"]] == [steps, 1.0]
    assert run.metrics[-1]["training/rollout_probs_diff_max"] < 1e-3


@pytest.mark.parametrize("backend", ["gloo", "tcp"])
def test_rollouts_of_a_host_that_is_cut_off_go_on_on_a_spare_one_and_then_beside_the_trainer(
    backend: str, tiny_model: Path, tmp_path: Path
):
    """There are no others. Nodes of `tcp` fetch the version in service themselves, those of `gloo` wait for a sync."""
    steps = 6
    overrides = (
        f"checkpoint_engine.backend={backend}",
        "actor_rollout_ref.actor.ppo_epochs=20",
        "checkpoint_engine.deadlines.publish_s=100",
        "checkpoint_engine.deadlines.prepare_s=100",
        "trainer.n_gpus_per_node=2",
        "trainer.num_cpus_per_rank=1.25",
        f"trainer.total_training_steps={steps}",
    )
    # The trainer has room on the first host alone, which is the driver's and stays.
    with (
        hosts_with_ray(3, ray=NOTICES_SOON, cpus=(5, 2, 2)) as cluster,
        cluster.running(tiny_model, tmp_path, *overrides) as run,
    ):
        places = []
        for step in (1, 3):
            run.wait_for_step(step)
            # On one that was cut off, processes end when they miss their cluster.
            (host,) = (host for host in run.hosts_with("ray::CheckpointEngineWorker") if host not in places)
            assert host in run.hosts_with("ray::RolloutServer")
            places.append(host)
            host.cut_off()
        output = run.output()
    first, second = places
    assert {first, second} == set(run.hosts[1:])
    assert f"{first.address} is lost; node-0, replica-0 go on on {second.address}" in output
    assert f"{second.address} is lost; node-0, replica-0 go on on {run.hosts[0].address}" in output
    committed = [report["version"] for report in run.reports if report["outcome"] == "committed"]
    assert sorted(set(committed)) == list(range(steps + 1))
    assert [step["step"] for step in run.metrics] == list(range(1, steps + 1))
    assert max(step["training/rollout_probs_diff_max"] for step in run.metrics) < 1e-3
