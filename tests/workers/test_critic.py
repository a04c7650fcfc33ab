from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForTokenClassification

from tests.workers.engine.engine_cases import LEARNING_RATE, NUM_RESPONSE, assert_same_weights, batch
from tests.workers.engine.megatron_cases import PP2, SEQUENCE, TP2
from tests.workers.test_fsdp_workers import configuration
from verl.single_controller import RankInfo
from verl.utils.config import from_mapping
from verl.workers.config import CriticConfig
from verl.workers.critic import ActorCriticWorker, CriticLoss
from verl.workers.losses import LossTotals


def critic_config(**options) -> CriticConfig:
    fsdp = {"dtype": "float32"}
    options = {
        "grad_clip": 0.5,
        "optim": {"lr": LEARNING_RATE},
        "fsdp": fsdp,
        "ppo_max_token_len_per_gpu": 40,
    } | options
    return from_mapping(CriticConfig, options)


def make_worker(path, engines, **options) -> ActorCriticWorker:
    """`engines`: strategies of actor and critic, and what Megatron is told."""
    actor, critic, megatron = engines
    worker = ActorCriticWorker.__new__(ActorCriticWorker)
    worker.rank_info = RankInfo(rank=dist.get_rank(), world_size=dist.get_world_size())
    config = configuration(path, strategy=actor, megatron={"dtype": "float32"} | megatron)
    worker.__init__(config, "actor", critic=critic_config(strategy=critic, **options), device="cpu")
    worker.init_model()
    worker.init_critic()
    return worker


def with_targets(data):
    generator = torch.Generator().manual_seed(3)
    mask = data.batch["response_mask"]
    data.batch["returns"] = torch.randn(len(data), NUM_RESPONSE, generator=generator) * mask
    data.batch["values"] = torch.zeros(len(data), NUM_RESPONSE)
    return data


def plain_values(model, data):
    """Sequence by sequence, without any padding."""
    values = torch.zeros(len(data), NUM_RESPONSE)
    for row in range(len(data)):
        kept = data.batch["attention_mask"][row].bool()
        count = int(data.batch["response_mask"][row].sum())
        ids = data.batch["input_ids"][row][kept].unsqueeze(0)
        values[row, :count] = model(input_ids=ids).logits[0, -count - 1 : -1, 0]
    return values


def plain_training(path, data, steps):
    """Values before each of the steps and after the last, and the weights then."""
    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32, num_labels=1).eval()
    torch.nn.init.zeros_(model.score.weight)
    torch.nn.init.zeros_(model.score.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    loss_fn, seen = CriticLoss(critic_config()), []
    for _ in range(steps):
        values = plain_values(model, data)
        seen.append(values.detach())
        loss, _ = loss_fn(values, None, data, LossTotals.of(data.batch["response_mask"]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [*seen, plain_values(model, data)], dict(model.named_parameters())


def train(path, engines, data, directory, steps):
    """The critic of a rank, saved after its steps, exported, and loaded by another."""
    rows = data.chunk(dist.get_world_size())[dist.get_rank()]
    worker, seen, metrics = make_worker(path, engines), [], []
    actor_before = [parameter.detach().clone() for parameter in worker.actor.model.parameters()]
    for _ in range(steps):
        seen.append(worker.compute_values(rows).batch["values"])
        metrics.append(worker.update_critic(rows))
    seen.append(worker.compute_values(rows).batch["values"])
    worker.save_critic_checkpoint(directory / "step")
    worker.critic.export_hf(directory / "hf")
    same_actor = all(map(torch.equal, actor_before, (p.detach() for p in worker.actor.model.parameters())))
    again = make_worker(path, engines)
    again.load_critic_checkpoint(directory / "step")
    loaded = again.compute_values(rows).batch["values"]
    exported = make_worker(path, engines, model={"path": str(directory / "hf")})
    return seen, metrics, same_actor, loaded, exported.compute_values(rows).batch["values"]


@pytest.mark.filterwarnings("ignore:Some weights")
@pytest.mark.parametrize(
    ("architecture", "tied", "world_size", "engines"),
    [
        pytest.param("qwen2", True, 2, ("fsdp2", "fsdp2", {}), id="fsdp2 with tied embeddings"),
        pytest.param("qwen3", False, 2, ("fsdp2", "fsdp2", {}), id="fsdp2"),
        pytest.param("qwen2", True, 2, ("fsdp2", "megatron", TP2), id="megatron beside fsdp2"),
        pytest.param("qwen3", False, 4, ("megatron", "megatron", TP2 | PP2 | SEQUENCE), id="megatron twice"),
    ],
)
def test_a_critic_learns_as_plain_torch_does_saves_loads_and_exports(
    ranks, models, tmp_path, architecture, tied, world_size, engines
):
    path, data = models(architecture, tied), with_targets(batch(8))
    expected, weights = plain_training(path, data, 2)
    results = ranks.run(train, world_size, path, engines, data, tmp_path, 2)
    for step, values in enumerate(expected):
        found = torch.cat([result[0][step] for result in results])
        torch.testing.assert_close(found, values, rtol=1e-3, atol=2e-3)
    assert expected[0].abs().max() == 0 < expected[1].abs().max()
    exported = AutoModelForTokenClassification.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert_same_weights({name: p.detach() for name, p in exported.named_parameters()}, weights)
    for seen, metrics, same_actor, loaded, again in results:
        assert metrics == results[0][1]
        assert metrics[0]["critic/grad_norm"] > 0
        assert metrics[0]["critic/lr"] == LEARNING_RATE
        assert metrics[0]["critic/vf_loss"] > metrics[1]["critic/vf_loss"]
        assert same_actor
        assert torch.equal(loaded, seen[-1])
        assert torch.equal(again, seen[-1])
