"""The actor's loss with a teacher, and the log-probs of tokens that were not sampled."""

import pytest
import torch

from verl.protocol import DataProto
from verl.utils.config import ConfigError
from verl.utils.torch_functional import candidate_logprobs_from_logits
from verl.workers.actor_loss import ActorLoss
from verl.workers.config import ActorConfig, DistillationLossConfig
from verl.workers.distilled_loss import TEACHER_CANDIDATE_LOG_PROBS, TEACHER_LOG_PROBS, DistilledLoss
from verl.workers.engine.base import CANDIDATE_LOG_PROBS
from verl.workers.losses import LossTotals

MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
OLD = torch.tensor([[-1.0, -2.0, 0.0], [-3.0, 0.0, 0.0]])
TEACHER = torch.tensor([[-1.5, -0.5, 0.0], [-3.0, 0.0, 0.0]])
NEW = torch.tensor([[-1.0, -2.0, 0.0], [-2.5, 0.0, 0.0]])
"""The student's at the update: the third token has become likelier by 0.5."""


def computed(distillation, log_prob=NEW, actor=None, **more):
    batch = {
        "response_mask": MASK,
        "old_log_probs": OLD,
        TEACHER_LOG_PROBS: TEACHER,
        "advantages": torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]]),
    }
    log_prob = log_prob.clone().requires_grad_()
    loss, metrics = DistilledLoss(actor or ActorConfig(), distillation, None)(
        log_prob, None, DataProto.from_dict(batch | more), LossTotals.of(MASK)
    )
    loss.backward()
    return loss.item(), {name: float(value) for name, value in metrics.items()}, log_prob.grad


def test_by_policy_gradient_each_token_has_the_teachers_advantage():
    """Rewards are -0.5, 1.5 and -0.5, ratios 1, 1 and e^0.5, which is clipped only where that makes the loss larger."""
    distillation = DistillationLossConfig(loss_mode="k1", use_policy_gradient=True, use_task_rewards=False)
    loss, metrics, gradient = computed(distillation)
    third = 0.5 * 2.718281828**0.5
    assert loss == pytest.approx((0.5 - 1.5 + third) / 3)
    assert gradient.tolist() == [
        [pytest.approx(0.5 / 3), pytest.approx(-1.5 / 3), 0.0],
        [pytest.approx(third / 3), 0.0, 0.0],
    ]
    assert metrics["actor/distillation/loss"] == pytest.approx(loss)
    assert metrics["actor/distillation/abs_loss"] == pytest.approx(2.5 / 3)
    assert metrics["actor/distillation/pg_clipfrac"] == 0.0
    assert "actor/pg_loss" not in metrics


def test_the_clip_range_is_that_of_distillation():
    """With the teacher far above, the third token's reward is 2.5, its ratio e^0.5 is cut at 1.1: no gradient."""
    teacher = TEACHER.clone()
    teacher[1, 0] = 0.0
    distillation = DistillationLossConfig(
        loss_mode="k1", use_policy_gradient=True, use_task_rewards=False, clip_ratio_low=0.3, clip_ratio_high=0.1
    )
    loss, metrics, gradient = computed(distillation, actor=ActorConfig(clip_ratio=0.9), **{TEACHER_LOG_PROBS: teacher})
    assert loss == pytest.approx((0.5 - 1.5 - 2.5 * 1.1) / 3)
    assert gradient[1, 0].item() == 0.0
    assert metrics["actor/distillation/pg_clipfrac"] == pytest.approx(1 / 3)


def test_by_its_own_gradient_it_is_the_mean_of_the_tokens():
    distillation = DistillationLossConfig(loss_mode="k2", use_task_rewards=False)
    loss, metrics, gradient = computed(distillation)
    assert loss == pytest.approx((0.125 + 1.125 + 0.125) / 3)
    assert metrics["actor/distillation/loss"] == pytest.approx(loss)
    assert gradient.tolist() == [[pytest.approx(0.5 / 3), pytest.approx(-1.5 / 3), 0.0], [pytest.approx(0.5 / 3), 0, 0]]


def test_beside_task_rewards_it_has_its_weight():
    actor = ActorConfig(clip_ratio=0.1)
    distillation = DistillationLossConfig(loss_mode="k2", distillation_loss_coef=4.0)
    loss, metrics, _ = computed(distillation, actor=actor)
    tensors = {"response_mask": MASK, "old_log_probs": OLD, "advantages": torch.tensor([[1.0] * 3, [-1.0] * 3])}
    alone, _ = ActorLoss(actor)(NEW, None, DataProto.from_dict(tensors), LossTotals.of(MASK))
    assert loss == pytest.approx(alone.item() + 4.0 * (0.125 + 1.125 + 0.125) / 3)
    assert metrics["actor/pg_loss"] == pytest.approx(alone.item())


def test_the_teachers_tokens_are_compared_and_their_masses_told():
    q = torch.full((2, 3, 2), 0.25).log()
    p = torch.tensor([0.6, 0.3]).log().expand(2, 3, 2)
    distillation = DistillationLossConfig(loss_mode="forward_kl_topk", topk=2, use_task_rewards=False)
    loss, metrics, gradient = computed(
        distillation, **{CANDIDATE_LOG_PROBS: q.clone().requires_grad_(), TEACHER_CANDIDATE_LOG_PROBS: p}
    )
    assert loss == pytest.approx(0.6 * torch.tensor(0.6 / 0.25).log().item() + 0.3 * torch.tensor(1.2).log().item())
    assert gradient is None or not gradient.any()
    assert metrics["actor/distillation/student_mass"] == pytest.approx(0.5)
    assert metrics["actor/distillation/teacher_mass"] == pytest.approx(0.9)


def test_an_engine_that_tells_of_no_other_tokens_is_an_error():
    with pytest.raises(ConfigError, match="loss_mode=forward_kl_topk: the training engine returns log-probs of"):
        computed(DistillationLossConfig(loss_mode="forward_kl_topk"))


def test_log_probs_of_candidates_are_those_of_the_distribution():
    logits = torch.randn(1, 5, 11, requires_grad=True)
    candidates = torch.randint(11, (1, 5, 3))
    found = candidate_logprobs_from_logits(logits, candidates)
    torch.testing.assert_close(found, logits.log_softmax(-1).gather(-1, candidates))
    found.sum().backward()
    whole = logits.detach().clone().requires_grad_()
    whole.log_softmax(-1).gather(-1, candidates).sum().backward()
    torch.testing.assert_close(logits.grad, whole.grad)
