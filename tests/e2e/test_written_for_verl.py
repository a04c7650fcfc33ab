import pytest

from tests.e2e.job import in_process
from tests.e2e.test_training import Run

pytestmark = pytest.mark.e2e
MODULE = "tests.e2e.written_for_verl"


def test_code_written_for_verl_trains(ray_cluster, tmp_path, tiny_model):
    (tmp_path / "loops.yaml").write_text(f"- {{name: once, _target_: '{MODULE}:Once'}}\n")
    run = Run(
        tmp_path,
        in_process(
            tmp_path,
            f"actor_rollout_ref.model.path={tiny_model}",
            f"actor_rollout_ref.model.external_lib={MODULE}",
            "trainer.n_gpus_per_node=1",
            "trainer.total_training_steps=1",
            "algorithm.adv_estimator=centred",
            "actor_rollout_ref.actor.policy_loss.loss_mode=plain",
            "reward_model.reward_manager=lengths",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=once",
        ),
    )
    metrics = run.metrics[1]
    assert metrics["actor/mine"] == pytest.approx(2.0)
    assert metrics["reward_extra/length/mean"] == 1.0
    assert metrics["agent_loop/generate_sequences/mean"] == pytest.approx(0.1)
    assert metrics["training/staleness/max"] == 0.0  # the versions are those that the servers said
    assert metrics["actor/grad_norm"] > 0
