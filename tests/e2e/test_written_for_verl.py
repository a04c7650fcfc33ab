import pytest

from tests.e2e.test_training import Run

pytestmark = pytest.mark.e2e
MODULE = "tests.e2e.written_for_verl"


def test_code_written_for_verl_trains(ray_cluster, tmp_path, tiny_model):
    (tmp_path / "loops.yaml").write_text(f"- {{name: once, _target_: '{MODULE}:Once'}}\n")
    run = Run.of(
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
    )
    metrics = run.metrics[1]
    assert metrics["actor/mine"] == pytest.approx(2.0)
    assert metrics["reward_extra/length/mean"] == 1.0
    assert metrics["agent_loop/generate_sequences/mean"] == pytest.approx(0.1)
    assert metrics["training/staleness/max"] == 0.0  # the versions are those that the servers said
    assert metrics["actor/grad_norm"] > 0


def test_a_checkpoint_engine_written_for_verl_syncs(ray_cluster, tmp_path, tiny_model):
    run = Run.of(
        tmp_path,
        f"actor_rollout_ref.model.path={tiny_model}",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        "trainer.placement=separate",
        "actor_rollout_ref.rollout.name=hf",
        "checkpoint_engine.backend=verl-queue",
        "checkpoint_engine.custom_backend_module=tests.checkpoint_engine.queue_backend",
        "+checkpoint_engine.engine_kwargs.verl-queue.topic=w:1",
    )
    assert [(report["version"], report["outcome"], report["retries"]) for report in run.reports] == [
        (version, "committed", 0) for version in range(3)
    ]
    assert run.metrics[2]["training/rollout_probs_diff_mean"] < 1e-3
