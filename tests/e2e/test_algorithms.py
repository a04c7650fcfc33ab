"""Whole runs of estimators and of ways to choose samples that need more than a batch of responses."""

import math

import pytest

from tests.e2e.job import in_process
from tests.e2e.test_training import Run
from tests.float8 import NEEDS_FLOAT8
from verl.experimental.fully_async_policy import fully_async_main
from verl.experimental.fully_async_policy.trainer import FullyAsyncTrainer
from verl.experimental.one_step_off_policy import main_ppo as one_step_off
from verl.experimental.one_step_off_policy.trainer import OneStepOffPolicyTrainer
from verl.trainer.ppo.dynamic_sampling import TooFewGroups
from verl.utils.config import ConfigError

MODES = {
    "one_step_off": (OneStepOffPolicyTrainer, one_step_off),
    "fully_async": (FullyAsyncTrainer, fully_async_main),
}
pytestmark = [pytest.mark.e2e, pytest.mark.cells(4)]

REWARD = """
import itertools

calls = itertools.count()

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    # Of a prompt with an even index two responses never earn the same, of one with an odd index they always do.
    call, chosen = next(calls), extra_info["index"] % 2 == 0
    score = call % 2 if chosen else 0.5
    return {"score": score, "acc": score, "length": len(solution_str), "even": float(chosen)}
"""


@pytest.fixture
def base(tmp_path, tiny_model):
    (tmp_path / "reward.py").write_text(REWARD)
    return (
        f"actor_rollout_ref.model.path={tiny_model}",
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
        "trainer.n_gpus_per_node=1",
        "data.shuffle=false",  # the first prompts in their order, every other one of which has an even index
        "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"trainer.rollout_data_dir={tmp_path / 'samples'}",
    )


def separately(mode, directory, *overrides):
    """A run in one of the modes whose engines have devices of their own."""
    trainer_class, main = MODES[mode]
    where = {"config_path": main.CONFIG_DIR, "config_name": main.CONFIG_NAME}
    overrides = (*overrides, "checkpoint_engine.backend=naive", f"trainer.rollout_data_dir={directory / 'samples'}")
    return Run.of(directory, *overrides, trainer_class=trainer_class, **where)


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
def test_remax_in_the_other_modes_subtracts_the_reward_of_a_greedy_response(ray_cluster, tmp_path, base, mode):
    run = separately(mode, tmp_path, *base, "algorithm.adv_estimator=remax")
    for metrics in run.metrics.values():
        assert "timing_s/gen_max" not in metrics  # it was generated beside the others
        expected = metrics["critic/rewards/mean"] - metrics["reward/greedy/mean"]
        assert metrics["critic/advantages/mean"] == pytest.approx(expected, abs=1e-5)


def test_remax_subtracts_the_reward_of_a_greedy_response(ray_cluster, tmp_path, base):
    run = Run.of(tmp_path, *base, "algorithm.adv_estimator=remax")
    for metrics in run.metrics.values():
        assert metrics["timing_s/gen_max"] > 0
        expected = metrics["critic/rewards/mean"] - metrics["reward/greedy/mean"]
        assert metrics["critic/returns/mean"] == pytest.approx(metrics["critic/rewards/mean"], abs=1e-5)
        assert metrics["critic/advantages/mean"] == pytest.approx(expected, abs=1e-5)


def test_the_optimal_token_baseline_runs_with_rejection_and_importance_weights(ray_cluster, tmp_path, base):
    run = Run.of(
        tmp_path,
        *base,
        "algorithm.adv_estimator=optimal_token_baseline",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
    )
    for metrics in run.metrics.values():
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.0
        assert metrics["actor/grad_norm"] > 0
        assert math.isfinite(metrics["critic/advantages/mean"])


def test_gdpo_and_the_plain_policy_gradient_without_old_log_probs(ray_cluster, tmp_path, base):
    run = Run.of(
        tmp_path,
        *base,
        "algorithm.adv_estimator=gdpo",
        "algorithm.gdpo_reward_keys=[acc,length]",
        "reward_model.reward_manager=gdpo",
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.rollout_correction.loss_type=reinforce",
        "algorithm.rollout_correction.rollout_is=sequence",
    )
    for metrics in run.metrics.values():
        assert metrics["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-4)
        assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=0.1)
        assert "timing_s/old_log_prob" in metrics


FILTER = (
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=acc",
    "algorithm.filter_groups.max_num_gen_batches=4",
    "data.gen_batch_size=3",
    "trainer.save_freq=1",
)


def test_dynamic_sampling_trains_on_groups_that_differ_and_resumes_where_it_was(ray_cluster, tmp_path, base):
    whole = Run.of(tmp_path, *base, *FILTER, "trainer.total_training_steps=3")
    for step, metrics in whole.metrics.items():
        assert metrics["reward_extra/even/mean"] == 1.0
        assert metrics["filter_groups/differing"] >= 4
        assert metrics["train/num_gen_batches"] >= 2
        assert len(whole.samples(step)) == 8
    again = tmp_path / "again"
    elsewhere = f"trainer.rollout_data_dir={again / 'samples'}"
    in_process(again, *base, *FILTER, elsewhere, "trainer.total_training_steps=2")
    resumed = Run.of(again, *base, *FILTER, elsewhere, "trainer.total_training_steps=3")
    assert resumed.questions(3) == whole.questions(3)
    assert resumed.metrics[3]["training/epoch"] == whole.metrics[3]["training/epoch"] > 0


ON_POLICY = ("async_training.staleness_threshold=0", "async_training.trigger_parameter_sync_step=1")


@pytest.mark.parametrize(
    ("mode", "age", "own"), [("one_step_off", 1, ()), ("fully_async", 0, (*ON_POLICY, "data.gen_batch_size=1"))]
)
def test_the_other_modes_sample_dynamically_and_resume_where_they_were(ray_cluster, tmp_path, base, mode, age, own):
    overrides = (*base, *FILTER, *own)
    whole = separately(mode, tmp_path / "whole", *overrides, "trainer.total_training_steps=3")
    for step, metrics in whole.metrics.items():
        assert metrics["reward_extra/even/mean"] == 1.0
        assert metrics["filter_groups/drawn"] > metrics["filter_groups/differing"] >= 4
        assert len(whole.samples(step)) == 8
        assert metrics["training/staleness/max"] == (age if step > 1 else 0)
    separately(mode, tmp_path / "again", *overrides, "trainer.total_training_steps=2")
    resumed = separately(mode, tmp_path / "again", *overrides, "trainer.total_training_steps=3")
    assert resumed.questions(3) == whole.questions(3)


def test_a_step_that_finds_too_few_groups_ends_the_run_with_the_reason(ray_cluster, tmp_path, base):
    with pytest.raises(TooFewGroups, match="after 1 batches, but a step needs 4"):
        in_process(tmp_path, *base, *FILTER, "algorithm.filter_groups.max_num_gen_batches=1")


def test_a_component_that_the_reward_function_does_not_return_is_named(ray_cluster, tmp_path, base):
    with pytest.raises(Exception, match="returned tone=None for sample 0, not a finite number; it has acc, length"):
        in_process(tmp_path, *base, "algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[tone]")


def test_a_data_set_smaller_than_what_is_drawn_is_refused_before_anything_starts(tmp_path, base):
    with pytest.raises(ConfigError, match=r"data.gen_batch_size=17 exceeds the 16 training samples"):
        in_process(tmp_path, *base, *FILTER, "data.gen_batch_size=17")


def test_the_trainer_follows_the_experts_that_the_rollout_engine_chose(ray_cluster, tmp_path):
    run = Run.of(
        tmp_path,
        "actor_rollout_ref.model.path=builtin:tiny-qwen3-moe",
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.router_replay.mode=R3",
        "actor_rollout_ref.actor.megatron.dtype=float32",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
    )
    assert len(run.metrics) == 2
    for metrics in run.metrics.values():
        assert metrics["training/rollout_probs_diff_max"] < 1e-4


@pytest.mark.vllm
@NEEDS_FLOAT8
def test_what_a_quantized_engine_of_two_ranks_samples_is_weighed(ray_cluster, tmp_path):
    run = Run.of(
        tmp_path,
        "actor_rollout_ref.model.path=builtin:tiny-qwen3-moe",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.rollout.quantization=fp8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "algorithm.rollout_correction.rollout_is=token",
        "checkpoint_engine.check_engine=always",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2",
    )
    first, *later = (report["engine_checks"]["replica-0"]["found"] for report in run.reports)
    assert first.endswith("live tensors equal a load from disk")
    assert [found.partition("live tensors ")[2] for found in later] == ["were written anew"] * 2
    for metrics in (run.metrics[1], run.metrics[2]):
        assert 1e-3 < metrics["training/rollout_probs_diff_mean"] < 2e-2
        assert metrics["rollout_corr/rollout_is_min"] < 0.99
