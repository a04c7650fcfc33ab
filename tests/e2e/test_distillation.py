"""Whole runs with teachers: what they say is what their weights say, and the student comes closer to them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.test_algorithms import separately
from tests.e2e.test_training import Run
from verl.utils.builtin import make_tiny_model
from verl.utils.tracking import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 2)
"""
TEACHER = "distillation.teacher_models"
LOSS = "distillation.distillation_loss"


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Two that are surer than random models are: their logits are many times as large."""
    directories = []
    for seed in (5, 6):
        directory = make_tiny_model(tmp_path_factory.mktemp("teachers") / str(seed), seed=seed)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            model.lm_head.weight.mul_(20)
        model.save_pretrained(directory)
        directories.append(directory)
    return directories


@pytest.fixture
def base(tmp_path, tiny_model, teachers):
    (tmp_path / "reward.py").write_text(REWARD)
    return (
        f"actor_rollout_ref.model.path={tiny_model}",
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.dtype=float32",
        "distillation.enabled=true",
        "distillation.nnodes=1",
        *of_teacher("teacher_model", teachers[0]),
        f"trainer.rollout_data_dir={tmp_path / 'samples'}",
    )


def of_teacher(name, directory, *more):
    section = f"{TEACHER}.{name}"
    inference = ("tensor_model_parallel_size=1", "cpu_kvcache_gib=0.05", "max_num_seqs=8")
    return (
        f"{section}.model_path={directory}",
        *(f"{section}.inference.{key}" for key in inference),
        *(f"{section}.{key}" for key in more),
    )


@torch.no_grad()
def log_probs(directory, samples):
    """Of the tokens of every response, [n] for each, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = []
    for sample in samples:
        ids = torch.tensor([[*sample["prompt_ids"], *sample["response_ids"]]])
        count = len(sample["response_ids"])
        said = model(ids).logits[0, -count - 1 : -1].log_softmax(-1)
        found.append(said.gather(-1, ids[0, -count:, None])[:, 0])
    return found


def mean_difference(student, teacher):
    return (torch.cat(student) - torch.cat(teacher)).mean().item()


def samples_of(directory, step):
    return [json.loads(line) for line in (directory / "samples" / f"{step}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_the_divergence_that_is_told_is_the_one_of_both_models(
    ray_cluster, tmp_path, base, tiny_model, teachers, strategy
):
    run = Run.of(
        tmp_path,
        *base,
        f"actor_rollout_ref.actor.strategy={strategy}",
        "actor_rollout_ref.actor.megatron.dtype=float32",
        f"{LOSS}.loss_mode=k1",
        f"{LOSS}.use_policy_gradient=true",
        f"{LOSS}.use_task_rewards=false",
    )
    first = run.metrics[1]
    samples = samples_of(tmp_path, 1)
    expected = mean_difference(log_probs(tiny_model, samples), log_probs(teachers[0], samples))
    assert expected > 0.1
    assert first["actor/distillation/kl"] == pytest.approx(expected, abs=1e-3)
    assert first["actor/distillation/loss"] == pytest.approx(expected, abs=1e-3)
    assert first["actor/distillation/loss_min"] < first["actor/distillation/loss_max"]
    assert first["actor/grad_norm"] > 0
    assert "actor/pg_loss" not in first
    assert "timing_s/teacher" in first


def test_each_sample_has_the_teacher_of_its_source(ray_cluster, tmp_path, base, tiny_model, teachers):
    """On two ranks, beside the policy loss, with all that the teachers' likeliest tokens have."""
    rows = {
        "data_source": ["left", "right"] * 4,
        "prompt": [[{"role": "user", "content": f"{number} + 1 ="}] for number in range(8)],
        "reward_model": [{"style": "rule", "ground_truth": "2"}] * 8,
    }
    pq.write_table(pa.table(rows), tmp_path / "data.parquet")
    others = [each for each in base if not each.startswith(TEACHER)]
    run = Run.of(
        tmp_path,
        *others,
        *of_teacher("one", teachers[0], "key=left", "num_replicas=1"),
        *of_teacher("two", teachers[1], "key=right", "num_replicas=1"),
        f"data.train_files={tmp_path / 'data.parquet'}",
        f"data.val_files={tmp_path / 'data.parquet'}",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.model.use_remove_padding=true",
        f"{LOSS}.loss_mode=forward_kl_topk",
        f"{LOSS}.topk=8",
    )
    samples = samples_of(tmp_path, 1)
    sources = {f"{number} + 1 =": rows["data_source"][number] for number in range(8)}
    left = [sources[sample["prompt"][-1]["content"]] == "left" for sample in samples]
    assert 0 < sum(left) < len(left)
    student = log_probs(tiny_model, samples)
    taught = [log_probs(directory, samples) for directory in teachers]
    own = [one if is_left else two for is_left, one, two in zip(left, *taught, strict=True)]
    assert run.metrics[1]["actor/distillation/kl"] == pytest.approx(mean_difference(student, own), abs=1e-3)
    for metrics in run.metrics.values():
        assert 0 < metrics["actor/distillation/student_mass"] < metrics["actor/distillation/teacher_mass"] <= 1.0001
        assert metrics["actor/distillation/loss"] > 0
        assert "actor/pg_loss" in metrics


def test_a_teacher_that_dies_ends_the_run_by_name(start, warm, base):
    job = start(*base, "trainer.total_training_steps=500", warm=warm)
    metrics = job.output_dir / "metrics.jsonl"
    job.wait_for(lambda: metrics.exists() and read_metrics(metrics), "the first step")
    [server] = job.find("ray::TeacherServer")
    server.kill()
    assert job.wait() == 1
    assert "teacher teacher_model-0 died" in job.stderr
    assert job.left() == []


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
def test_the_other_modes_have_teachers_too(ray_cluster, tmp_path, base, tiny_model, teachers, mode):
    run = separately(mode, tmp_path, *base, f"{LOSS}.loss_mode=k3", f"{LOSS}.use_task_rewards=false")
    samples = samples_of(tmp_path, 1)
    expected = mean_difference(log_probs(tiny_model, samples), log_probs(teachers[0], samples))
    assert run.metrics[1]["actor/distillation/kl"] == pytest.approx(expected, abs=1e-3)
    assert all(metrics["actor/grad_norm"] > 0 for step, metrics in run.metrics.items() if step)
