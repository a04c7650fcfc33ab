"""Log-probs of tokens that were not sampled, and their gradients, against transformers alone."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.workers.engine.engine_cases import NUM_RESPONSE, batch, make_engine
from verl.workers.config import DistillationLossConfig
from verl.workers.distilled_loss import TEACHER_CANDIDATE_LOG_PROBS
from verl.workers.engine.base import CANDIDATE_LOG_PROBS, CANDIDATES
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.losses.distillation import forward_kl_topk

TEMPERATURE, WIDTH = 0.7, 3
CONFIG = DistillationLossConfig(loss_mode="forward_kl_topk", topk=WIDTH)


def taught(rows):
    data = batch(rows)
    generator = torch.Generator().manual_seed(3)
    shape = (rows, NUM_RESPONSE, WIDTH)
    data.batch[CANDIDATES] = torch.randint(3, 60, shape, generator=generator, dtype=torch.int32)
    teacher = torch.randn(*shape[:2], 60, generator=generator).log_softmax(-1)
    data.batch[TEACHER_CANDIDATE_LOG_PROBS] = teacher[..., :WIDTH].contiguous()
    return data


def loss_of(data, candidates, num_tokens):
    losses = forward_kl_topk(candidates, data.batch[TEACHER_CANDIDATE_LOG_PROBS], CONFIG)
    return (losses * data.batch["response_mask"]).sum() / num_tokens


def by_micro_batch(log_prob, entropy, micro_batch, totals):
    return loss_of(micro_batch, micro_batch.batch[CANDIDATE_LOG_PROBS], totals.num_tokens), {}


def train(path, data, limits, options):
    rows = data.chunk(dist.get_world_size())[dist.get_rank()]
    return make_engine(path, **options).train_mini_batch(rows, by_micro_batch, temperature=TEMPERATURE, limits=limits)


def expected(path, data):
    """Loss and norm of its gradient, sequence by sequence."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    candidates = torch.zeros(len(data), NUM_RESPONSE, WIDTH)
    for row in range(len(data)):
        count = int(data.batch["response_mask"][row].sum())
        ids = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()][None]
        said = (model(ids).logits[0, -count - 1 : -1] / TEMPERATURE).log_softmax(-1)
        candidates[row, :count] = said.gather(-1, data.batch[CANDIDATES][row, :count].long())
    loss = loss_of(data, candidates, data.batch["response_mask"].sum())
    loss.backward()
    return loss.item(), torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]).item()


@pytest.mark.parametrize(
    ("world_size", "limits", "options"),
    [
        pytest.param(1, MicroBatchLimits(max_sequences=2), {}, id="one rank"),
        pytest.param(2, MicroBatchLimits(max_tokens=24), {"model": {"use_remove_padding": True}}, id="packed"),
        pytest.param(2, MicroBatchLimits(max_tokens=24), {"strategy": "fsdp"}, id="fsdp1"),
        pytest.param(
            2,
            MicroBatchLimits(max_tokens=24),
            {"fsdp": {"ulysses_sequence_parallel_size": 2}, "model": {"use_remove_padding": True}},
            id="shared",
        ),
    ],
)
def test_they_are_those_of_each_sequence_alone(ranks, models, world_size, limits, options):
    path, data = models("qwen2"), taught(8)
    loss, norm = expected(path, data)
    assert loss > 0.01
    for metrics in ranks.run(train, world_size, path, data, limits, options):
        assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
