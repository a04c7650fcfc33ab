from __future__ import annotations

import dataclasses
import os
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.workers.engine.engine_cases import (
    LEARNING_RATE,
    NUM_RESPONSE,
    assemble,
    assert_same_weights,
    batch,
    held_parts,
    reference_log_probs,
    reference_steps,
    weighted_loss,
)
from verl.protocol import DataProto
from verl.single_controller import RankInfo, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import ConfigError, from_mapping
from verl.workers.actor_loss import ActorLoss
from verl.workers.config import ActorConfig, ActorRolloutRefConfig
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.losses import LossTotals


def configuration(path, **actor) -> ActorRolloutRefConfig:
    fsdp = {"dtype": "float32"}
    return from_mapping(
        ActorRolloutRefConfig,
        {
            "model": {"path": str(path)},
            "actor": {
                "ppo_mini_batch_size": 4,
                "ppo_max_token_len_per_gpu": 40,
                "grad_clip": 0.5,
                "optim": {"lr": LEARNING_RATE},
                "fsdp_config": fsdp,
            }
            | actor,
            "ref": {"fsdp_config": fsdp},
            "rollout": {"n": 2},
        },
    )


def make_worker(path, role="actor", *, rank_info=None, **actor) -> ActorRolloutRefWorker:
    worker = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
    worker.rank_info = rank_info or RankInfo(rank=dist.get_rank(), world_size=dist.get_world_size())
    loss_fn = actor.pop("loss_fn", None)
    worker.__init__(configuration(path, **actor), role, loss_fn=loss_fn, device="cpu")
    return worker


def update(path, data):
    worker = make_worker(path, loss_fn=weighted_loss, ppo_epochs=2, entropy_coeff=0.01)
    worker.init_model()
    metrics = worker.update_actor(data.chunk(worker.world_size)[worker.rank])
    return metrics, held_parts(worker.actor)


def test_every_step_takes_an_equal_part_of_the_mini_batch_from_every_rank_in_order(ranks, models):
    """Eight prompts, two responses each: rank 0 holds the first eight sequences; a step takes four from each rank."""
    path, data = models("qwen2"), batch(16)
    mini_batches = [data[[0, 1, 2, 3, 8, 9, 10, 11]], data[[4, 5, 6, 7, 12, 13, 14, 15]]] * 2
    _, _, weights = reference_steps(path, mini_batches, temperature=1.0, grad_clip=0.5)
    results = ranks.run(update, 2, path, data)
    for metrics, _ in results:
        assert metrics["actor/lr"] == LEARNING_RATE
        assert metrics["actor/grad_norm"] > 0.0
        assert metrics["actor/skipped_steps"] == 0.0
        assert metrics["perf/cpu_memory_used_gb"] > 0.0
        assert metrics["memory/trainer/update_actor/host_peak_gb"] >= metrics["memory/trainer/update_actor/host_gb"] > 0
        assert metrics["memory/trainer/host_peak_gb"] >= metrics["memory/trainer/update_actor/host_peak_gb"]
    assert results[0][0] == results[1][0]
    assert_same_weights(assemble([parts for _, parts in results]), weights)


def looks_at_the_sync(path, data):
    """What an update asks of the sync, and how often."""
    worker = make_worker(path, loss_fn=weighted_loss, ppo_epochs=2)
    worker.init_model()
    asked = []
    worker._participant = SimpleNamespace(await_copied=lambda: asked.append("copied"))
    worker.update_actor(data.chunk(worker.world_size)[worker.rank])
    return asked


def test_an_update_waits_for_a_copy_of_its_weights_before_each_step(ranks, models):
    path, data = models("qwen2"), batch(16)
    assert ranks.run(looks_at_the_sync, 2, path, data) == [["copied"] * 4] * 2


def reports_entropy(path, data):
    """(entropy in the metrics, weights) of an update that only reports it, and of one that does not; mean entropy."""
    mask, found = data.batch["response_mask"], []
    for calculate_entropy in (True, False):
        worker = make_worker(path, ppo_mini_batch_size=8, calculate_entropy=calculate_entropy)
        worker.init_model()
        before = worker.compute_log_prob(data).batch
        data.batch["old_log_probs"], data.batch["advantages"] = before["old_log_probs"], torch.ones_like(mask).float()
        found.append((worker.update_actor(data).get("actor/entropy_loss"), held_parts(worker.actor)))
    return *found, (before["entropys"] * mask).sum() / mask.sum()


def test_the_entropy_may_be_reported_without_a_bonus(ranks, models):
    (entropy, weights), (missing, expected_weights), mean = ranks.run(reports_entropy, 1, models("qwen2"), batch(16))[0]
    assert entropy == pytest.approx(float(mean), rel=1e-4)
    assert missing is None
    assert_same_weights(assemble([weights]), assemble([expected_weights]))


def test_the_actor_loss_adds_entropy_bonus_and_kl_penalty_to_the_policy_loss():
    data, generator = batch(4), torch.Generator().manual_seed(1)
    mask = data.batch["response_mask"]
    log_prob, old, ref, entropy = (torch.randn(4, NUM_RESPONSE, generator=generator) for _ in range(4))
    data.batch["old_log_probs"], data.batch["ref_log_prob"] = old, ref
    totals = LossTotals.of(mask)

    plain, plain_metrics = ActorLoss(ActorConfig())(log_prob, None, data, totals)
    config = ActorConfig(entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="mse")
    full, metrics = ActorLoss(config)(log_prob, entropy, data, totals)

    mean_entropy = (entropy * mask).sum() / mask.sum()
    divergence = (0.5 * (log_prob - ref) ** 2 * mask).sum() / mask.sum()
    torch.testing.assert_close(full, plain - 0.1 * mean_entropy + 0.5 * divergence)
    assert float(metrics["actor/pg_loss"]) == pytest.approx(float(plain_metrics["actor/pg_loss"]))
    assert float(metrics["actor/kl_loss"]) == pytest.approx(float(divergence))

    data.batch["rollout_is_weights"] = torch.zeros(4, NUM_RESPONSE)
    assert ActorLoss(ActorConfig())(log_prob, None, data, totals)[0] == 0.0


def test_what_cannot_work_is_said_before_anything_starts(models):
    path, many = models("qwen2"), RankInfo(world_size=9)
    with pytest.raises(ConfigError, match=r"ppo_mini_batch_size=4 x rollout\.n=2 = 8 sequences are fewer than 9"):
        make_worker(path, rank_info=many)
    with pytest.raises(ConfigError, match=r"unknown role 'acter'.*'actor'"):
        make_worker(path, "acter", rank_info=RankInfo())
    config = configuration(path)
    greedy = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, temperature=0.0))
    with pytest.raises(ConfigError, match="temperature above 0"):
        ActorRolloutRefWorker(greedy, "actor", device="cpu")
    with pytest.raises(RuntimeError, match="no reference policy"):
        _ = make_worker(path, rank_info=RankInfo()).ref


@pytest.fixture(scope="module")
def group(ray_cluster, models):
    pool = RayResourcePool([2], num_cpus_per_process=0.4)
    spec = RayClassWithInitArgs(
        ActorRolloutRefWorker, configuration(models("qwen3", True)), "actor_rollout_ref", device="cpu"
    )
    with RayWorkerGroup(resource_pool=pool, ray_cls_with_init=spec, env_vars={"OMP_NUM_THREADS": "1"}) as workers:
        workers.init_model()
        yield workers


TENSOR_PARALLEL = {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 2}}


@pytest.mark.parametrize("engine", [{}, TENSOR_PARALLEL], ids=["fsdp2", "megatron"])
def test_a_rank_that_does_not_answer_ends_a_step_at_the_deadline_of_its_collectives(ray_cluster, models, engine):
    """Megatron's are those of groups that it makes itself."""
    config = configuration(models("qwen3", True), **engine)
    spec = RayClassWithInitArgs(
        ActorRolloutRefWorker, dataclasses.replace(config, nccl_timeout=20.0), "actor", device="cpu"
    )
    pool = RayResourcePool([2], num_cpus_per_process=0.4)
    with RayWorkerGroup(resource_pool=pool, ray_cls_with_init=spec, env_vars={"OMP_NUM_THREADS": "1"}) as workers:
        workers.init_model()
        workers.compute_log_prob(batch(16))
        stopped = workers.processes[1]
        os.kill(stopped.pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match="Timed out waiting 20000ms") as failure:
            workers.execute_all_async("compute_log_prob", batch(16)).get(timeout=300)
    assert f"rank 1 (pid {stopped.pid} on {stopped.address}) does not answer: stopped, or out of reach?" in (
        failure.value.__notes__
    )


def test_a_group_on_ray_computes_trains_saves_loads_and_exports(group, models, tmp_path):
    data = batch(16)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(models("qwen3", True), dtype=torch.float32)
        expected, entropies = reference_log_probs(model, data, 1.0)
    before = group.compute_log_prob(data)
    torch.testing.assert_close(before.batch["old_log_probs"], expected)
    torch.testing.assert_close(before.batch["entropys"], entropies)
    reference = group.compute_ref_log_prob(data)
    torch.testing.assert_close(reference.batch["ref_log_prob"], expected)

    group.save_checkpoint(str(tmp_path / "step"))
    metrics = group.update_actor(DataProto.from_dict(tensors=dict(data.union(before).batch.items())))
    assert metrics[0] == metrics[1]
    assert {"actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/grad_norm", "actor/lr"} <= metrics[0].keys()

    trained = group.compute_log_prob(data).batch["old_log_probs"]
    assert not torch.allclose(trained, expected)
    torch.testing.assert_close(group.compute_ref_log_prob(data).batch["ref_log_prob"], expected)

    group.export_hf(str(tmp_path / "hf"))
    with torch.no_grad():
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
        torch.testing.assert_close(reference_log_probs(exported, data, 1.0)[0], trained)

    group.load_checkpoint(str(tmp_path / "step"))
    torch.testing.assert_close(group.compute_log_prob(data).batch["old_log_probs"], expected)


def test_log_probs_are_taken_at_the_temperature_of_the_batch(group):
    data = batch(16)
    plain = group.compute_log_prob(data).batch["old_log_probs"]
    data.meta_info["temperature"] = 0.5
    assert not torch.allclose(group.compute_log_prob(data).batch["old_log_probs"], plain)


def dtypes_sent(path, kept_wide):
    worker = make_worker(path)
    worker.init_model()
    worker.keep_wide(kept_wide)
    return {spec.name: spec.dtype for spec in worker.weight_source().specs()}


def test_what_engines_keep_in_float32_is_sent_as_it_is_held(ranks, models):
    routers = ["model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"]
    sent = ranks.run(dtypes_sent, 1, models("qwen3_moe"), routers)[0]
    assert sorted(name for name, dtype in sent.items() if dtype == "float32") == routers
    assert set(sent.values()) == {"float32", "bfloat16"}
