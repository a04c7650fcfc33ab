"""A run whose syncs move what changed is, version for version and bit for bit, the run whose syncs move everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_training import REWARD, Run
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.step import Step

pytestmark = [pytest.mark.e2e, pytest.mark.cells(2)]

STEPS = 6
REPEATABLE = (
    "algorithm.adv_estimator=reinforce_plus_plus",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.do_sample=false",
    "data.train_max_samples=32",
    f"trainer.total_training_steps={STEPS}",
    "checkpoint_engine.retries=0",
)
"""Greedy and in float32: tokens do not depend on which requests came together to be computed in one batch."""


def run(directory: Path, *overrides: str) -> tuple[Run, dict[int, bytes]]:
    """A run, and the trainer's digests of every version that was committed."""
    digests: dict[int, bytes] = {}

    class Noting(RayPPOTrainer):
        def update_weights(self, now: Step, generating: object = None) -> None:
            super().update_weights(now, generating)
            held = self.cluster._manager._held
            digests[held.version] = held.digests

    reward = directory / "reward.py"
    reward.write_text(REWARD)
    own_reward = f"custom_reward_function.path={reward}"
    return Run.of(directory, *REPEATABLE, own_reward, *overrides, trainer_class=Noting), digests


@pytest.fixture(scope="module")
def full(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    """The digests of each version of a run that moves everything."""
    made, digests = run(tmp_path_factory.mktemp("full"), "checkpoint_engine.backend=tcp", "checkpoint_engine.delta=off")
    assert [report["delta"] for report in made.reports] == [None] * (STEPS + 1)
    assert len(set(digests.values())) == STEPS + 1  # every step changed something
    return digests


@pytest.mark.parametrize("backend", ["tcp", "gloo"])
def test_every_version_has_the_same_digests_with_deltas_and_without(
    backend: str, full: dict[int, bytes], tmp_path: Path
) -> None:
    made, digests = run(tmp_path, f"checkpoint_engine.backend={backend}", "checkpoint_engine.delta=always")
    assert list(digests) == list(range(STEPS + 1))
    assert [version for version in digests if digests[version] != full[version]] == []
    assert [report["delta"]["way"] for report in made.reports[1:]] == ["delta"] * STEPS
