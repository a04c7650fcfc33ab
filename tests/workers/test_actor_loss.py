import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl.protocol import DataProto
from verl.utils.config import ConfigError
from verl.workers.actor_loss import ActorLoss
from verl.workers.config import ActorConfig, RolloutCorrectionConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.engine.totals import sums_of
from verl.workers.losses import LossTotals, agg_loss, register_policy_loss
from verl.workers.losses.correction import KEPT

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@register_policy_loss("written_for_verl")
def loss_written_for_verl(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
):
    token_losses = -advantages * (log_prob - old_log_prob).exp() * config.get("clip_ratio_c", 0.0)
    drift = ((old_log_prob - log_prob) * response_mask).sum() / response_mask.sum()
    return agg_loss(token_losses, response_mask, loss_agg_mode), {"actor/ppo_kl": drift.item()}


@register_policy_loss("returns_four")
def loss_of_an_old_version(**arguments):
    return arguments["log_prob"].sum(), 0.0, 0.0, 0.0


def batch():
    generator = torch.Generator().manual_seed(1)
    old, advantages = torch.randn(2, 4, 3, generator=generator)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
    tensors = {"old_log_probs": old, "advantages": advantages, "response_mask": mask}
    return DataProto.from_dict(tensors), torch.randn(4, 3, generator=generator)


def config(loss_mode, **options):
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss_mode), **options)


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_written_for_verl_is_the_same_however_the_mini_batch_is_cut(mode):
    data, log_prob = batch()
    totals = LossTotals.of(data.batch["response_mask"])
    loss = ActorLoss(config("written_for_verl", loss_agg_mode=mode))
    whole, metrics = loss(log_prob, None, data, totals)
    parts = [loss(log_prob[rows], None, data[rows], totals) for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(part for part, _ in parts), whole)
    assert sum(part["actor/ppo_kl"] for _, part in parts) == pytest.approx(metrics["actor/ppo_kl"])


@pytest.mark.parametrize("mode", ["vanilla", "written_for_verl"])
def test_the_constant_of_dr_grpo_is_the_divisor_of_every_policy_loss(mode):
    data, log_prob = batch()
    totals = LossTotals.of(data.batch["response_mask"])
    by_columns, by_constant = (
        ActorLoss(config(mode, loss_agg_mode="seq-mean-token-sum-norm", **more))(log_prob, None, data, totals)[0]
        for more in ({}, {"loss_scale_factor": 12})
    )
    torch.testing.assert_close(by_constant, by_columns * 3 / 12)


def test_a_loss_that_returns_something_else_is_named():
    data, log_prob = batch()
    with pytest.raises(ConfigError, match=r"loss_mode=returns_four: a loss returns \(loss, dict of metrics\)"):
        ActorLoss(config("returns_four"))(log_prob, None, data, LossTotals.of(data.batch["response_mask"]))


RATIOS = torch.tensor([[2.0, 0.5], [1.5, 9.0]])  # the policy as it is / the rollout engine's; the last one is padding


def corrected(**correction):
    """Loss, metrics, and d loss / d log_prob of a mini-batch whose old log-probs are the rollout engine's."""
    mask = torch.tensor([[1, 1], [1, 0]])
    advantages = torch.tensor([[1.0, 1.0], [-2.0, -2.0]])
    data = DataProto.from_dict({"old_log_probs": torch.zeros(2, 2), "advantages": advantages, "response_mask": mask})
    log_prob = RATIOS.log().requires_grad_()
    loss_fn = ActorLoss(config("vanilla", clip_ratio=10.0), RolloutCorrectionConfig(**correction))
    loss, metrics = loss_fn(log_prob, None, data, LossTotals.of(mask))
    loss.backward()
    return loss.item(), metrics, log_prob.grad


def test_what_is_rejected_has_no_part_in_the_loss_but_counts_as_it_did():
    loss, metrics, gradient = corrected(rollout_rs="token_k1", rollout_rs_threshold="0.333_1.667")
    assert loss == pytest.approx((-2.0 + 3.0) / 3)
    assert torch.allclose(gradient, torch.tensor([[-2.0, 0.0], [3.0, 0.0]]) / 3)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 2)
    assert metrics["actor/ppo_kl"] == pytest.approx(-(math.log(2.0) + math.log(1.5)) / 2)  # of those that are kept


@pytest.mark.parametrize("mode", MODES)
def test_a_token_weighs_the_same_whatever_is_rejected_beside_it_before_the_update_or_in_it(mode):
    """Old log-probs are the engine's, so that both ways reject the same: the second token of the first of two rows."""
    mask, kept = torch.tensor([[1, 1], [1, 0]]), torch.tensor([[1, 0], [1, 0]])
    terms = {"loss_agg_mode": mode, "entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.5}
    correction = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.333_1.667")
    tensors = {
        "old_log_probs": torch.zeros(2, 2),
        "ref_log_prob": torch.full((2, 2), -1.0),
        "advantages": torch.tensor([[1.0, 1.0], [-2.0, -2.0]]),
        "response_mask": mask,
    }
    gradients = []
    for more, rejects in (({}, correction), ({KEPT: kept}, None)):
        log_prob, entropy = RATIOS.log().requires_grad_(), torch.full((2, 2), 2.0, requires_grad=True)
        loss_fn = ActorLoss(config("vanilla", clip_ratio=10.0, **terms), rejects)
        loss, _ = loss_fn(log_prob, entropy, DataProto.from_dict(tensors | more), LossTotals.of(mask))
        gradients.append(torch.autograd.grad(loss, (log_prob, entropy)))
    for in_it, before in zip(*gradients, strict=True):
        torch.testing.assert_close(in_it, before)
        assert in_it[0, 1] == 0
    if mode == "token-mean":
        torch.testing.assert_close(gradients[0][1], -0.1 * kept / 3)


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("threshold", [2.0, "0.5_2.0"])
def test_a_rank_without_a_token_tells_zero_under_the_names_of_all(loss_type, threshold):
    """Ranks add up what they tell, name by name."""
    options = {"rollout_is": "token", "rollout_is_threshold": threshold, "rollout_is_batch_normalize": True}
    rejecting = {"rollout_rs": "token_k3,seq_sum_k1", "rollout_rs_threshold": "0.2,0.5_2.0"}
    correction = RolloutCorrectionConfig(loss_type=loss_type, **options, **rejecting)
    data, log_prob = batch()
    totals, loss = LossTotals.of(data.batch["response_mask"]), ActorLoss(config("vanilla"), correction)
    _, of_one = loss(log_prob[:3], None, data[:3], totals)
    nothing, of_other = loss(log_prob[3:], None, data[3:], totals)
    assert float(nothing) == 0.0
    assert {name: float(value) for name, value in of_other.items()} == dict.fromkeys(of_one, 0.0)
    assert len(of_one) > 40


class Waits(TorchDispatchMode):
    """Counts what a host would wait for if tensors were on a device: numbers of them, copies, and their selections by a
    mask. What comes from a copy to the host alone is there."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self._on_host = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = [tensor for tensor in inputs if id(tensor) not in self._on_host]
        copies = function is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
        selects = function in (torch.ops.aten.index.Tensor, torch.ops.aten.nonzero.default)
        if on_device and (copies or selects or function is torch.ops.aten._local_scalar_dense.default):
            self.count += 1
        result = function(*args, **kwargs)
        if copies or not on_device:
            self._on_host |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        return result


@pytest.mark.parametrize(("loss_type", "own"), [("ppo_clip", 3), ("reinforce", 1)])
def test_all_that_a_correction_in_the_update_tells_is_waited_for_once(loss_type, own):
    options = {"rollout_is": "token", "rollout_is_batch_normalize": True, "loss_type": loss_type}
    rejecting = {"rollout_rs": "token_k3,seq_sum_k1", "rollout_rs_threshold": "0.2,0.5_2.0"}
    data, log_prob = batch()
    totals = LossTotals.of(data.batch["response_mask"])
    loss = ActorLoss(config("vanilla"), RolloutCorrectionConfig(**options, **rejecting))
    with Waits() as waits:
        _, metrics = loss(log_prob.detach(), None, data, totals)
    assert len(metrics) > 40
    assert waits.count == 1 + own  # of the policy loss itself


def test_sums_over_micro_batches_are_waited_for_once():
    shares = [{"a": torch.tensor(0.1 * step), "b": torch.tensor([2]), "c": 0.5} for step in range(20)]
    with Waits() as waits:
        sums = sums_of(shares)
    assert sums == pytest.approx({"a": 19.0, "b": 40.0, "c": 10.0})
    assert waits.count == 0  # beside `tolist`, once for each kind, which is not seen here


def test_reinforce_weighs_the_plain_policy_gradient_without_a_clip():
    _, metrics, gradient = corrected(loss_type="reinforce", rollout_is="token", rollout_is_threshold=1.8)
    assert torch.allclose(gradient, torch.tensor([[-1.8, -0.5], [3.0, 0.0]]) / 3)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((1.8 + 0.5 + 1.5) / 3)
    _, _, gradient = corrected(loss_type="reinforce", rollout_is="sequence")
    assert torch.allclose(gradient, torch.tensor([[-1.0, -1.0], [3.0, 0.0]]) / 3)


def test_the_clipped_loss_has_its_ratio_and_no_second_weight():
    assert corrected(rollout_is="token", rollout_is_threshold=0.1)[0] == pytest.approx((-2.0 - 0.5 + 3.0) / 3)
