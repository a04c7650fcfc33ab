"""A trainer on three hosts that loses one of them, and one of them at another time: it ends as if nothing had been."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.e2e import seeded
from tests.e2e.hosts import NOTICES_SOON, HostsWithRay, Run, hosts_with_ray

# Three ranks start three times, each on a host of its own.
pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(900), pytest.mark.cells(2)]

STEPS = 8
RANK, KEEPER = ("ray::ActorRolloutRefWorker", "ray::trainer."), "ray::StateKeeper"
"""As Ray calls their processes; ranks at work have another name."""
OVERRIDES = (
    "trainer.nnodes=3",
    "trainer.n_gpus_per_node=1",
    "checkpoint_engine.backend=gloo",
    "checkpoint_engine.deadlines.publish_s=15",
    "actor_rollout_ref.nccl_timeout=15",  # for so long the others wait for a rank that is cut off
    "data.train_batch_size=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    "data.train_max_samples=48",
)
WENT_ON = re.compile(
    r"trainer rank.* (?:died|does not answer).*; the trainer goes on after step (\d+), (.*), after \d+\.\d s"
)


def train(cluster: HostsWithRay, files: Path, directory: Path) -> AbstractContextManager[Run]:
    directory.mkdir()
    return cluster.running(files / "llama", directory, *seeded.overrides(files, directory, STEPS), *OVERRIDES)


def test_whichever_host_is_lost_its_ranks_get_their_state_of_the_parity_that_others_have(tmp_path: Path):
    files = seeded.make_files(tmp_path)
    with hosts_with_ray(4, ray=NOTICES_SOON) as cluster:
        with train(cluster, files, tmp_path / "whole") as whole:
            whole.output()
        with train(cluster, files, tmp_path / "died") as died:
            died.wait_for_step(2)
            before = died.hosts_with(KEEPER)
            emptied = before[0]
            died.kill(emptied, RANK, KEEPER)  # the host is there, and what it had in memory is not
            died.wait_for_step(5)
            assert died.hosts_with(KEEPER) == before, "the ranks are where they were, and rollouts where they are not"
            lost = next(host for host in before if host not in (emptied, died.hosts[0]))
            lost.cut_off()
            output = died.output()
    assert "the training state in memory survives the loss of a host, with" in output
    assert [source for _, source in WENT_ON.findall(output)] == ["from memory", "from memory"], output
    seeded.require_equal(whole.output_dir, died.output_dir)
    committed = [report for report in died.reports if report["outcome"] == "committed"]
    assert [report["version"] for report in committed] == list(range(STEPS + 1))
