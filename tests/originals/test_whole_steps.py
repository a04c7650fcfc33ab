"""Whole training steps of GRPO and PPO against PyPI's verl: every metric that its loop logs, by name and by value."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

from tests.originals.original import OURS, VERL, computed, differences
from verl.utils.builtin.tokenizer import build_tokenizer

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
VOCABULARY = 4096
OWN_NAMES = {
    "memory of an update": ("/perf/max_memory_", "/perf/cpu_memory_used_gb"),
    "`perf/mfu/actor_infer`, `perf/mfu/critic`": ("perf/mfu/actor_infer", "perf/mfu/critic"),
    "`timing_s/start_profile`, `timing_s/stop_profile`": ("timing_s/start_profile", "timing_s/stop_profile"),
}
"""What verl tells and we do not, by the name of the difference."""
RATES = ("actor/lr", "critic/lr")
MEASURED = ("timing_s/", "timing_per_token_ms/", "perf/time_per_step", "perf/throughput", "perf/mfu/")
SHARED = {
    "data.train_batch_size": 4,
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
}
GRPO = {
    **SHARED,
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm",
    "actor_rollout_ref.actor.loss_scale_factor": 3,
}
SCHEDULED = {"lr_scheduler_type": "cosine", "total_training_steps": 4, "min_lr_ratio": 0.1, "betas": [0.8, 0.95]}
DECAYED = {"weight_decay": 100.0, **SCHEDULED}  # a tenth of every parameter, norms and biases too, in each update
PPO = {
    **SHARED,
    "algorithm.adv_estimator": "gae",
    "critic.optim.lr": 1e-3,
    **{
        f"{role}.optim.{name}": value
        for role in ("actor_rollout_ref.actor", "critic")
        for name, value in DECAYED.items()
    },
    "critic.ppo_mini_batch_size": 2,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.actor.entropy_coeff": 0.01,
    "trainer.balance_batch": False,  # of mini-batches, it matters which sequences they have
}
CORRECTION = "algorithm.rollout_correction"
ODD = {
    **PPO,
    "algorithm.use_kl_in_reward": True,
    f"{CORRECTION}.rollout_is": "token",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "critic.ppo_micro_batch_size_per_gpu": 4,
}
"""A micro-batch is a whole mini-batch."""
REJECTING = {**PPO, f"{CORRECTION}.rollout_rs": "seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold": "0.75_1.5"}
CLIP = 0.05
COEFFICIENT = {"algorithm.kl_ctrl.kl_coef": 0.1}
OF_VERL = {
    "critic.enable": True,
    "actor_rollout_ref.actor.optim.clip_grad": CLIP,
    "critic.optim.clip_grad": CLIP,
    **COEFFICIENT,
}
OF_OURS = {"actor_rollout_ref.actor.grad_clip": CLIP, "critic.grad_clip": CLIP, **COEFFICIENT}
RUNS = [GRPO, *(run | OF_VERL for run in (PPO, ODD, REJECTING))]
OUR_RUNS = [GRPO, *(run | OF_OURS for run in (PPO, ODD, REJECTING))]


def batch(seed: int, *, empty: Sequence[int] = (), masked: Sequence[int] = ()) -> dict[str, Any]:
    """Eight ragged samples, prompts of up to 5 and responses of up to 7 tokens, with scores.

    The responses `empty` have no token, and of the responses `masked` the policy wrote none.
    """
    draw = torch.Generator().manual_seed(seed)
    rows, prompt, response = 8, 5, 7
    prompts = torch.randint(1, prompt + 1, (rows, 1), generator=draw)
    responses = torch.randint(1, response + 1, (rows, 1), generator=draw)
    responses[[*empty]] = 0
    left, right = torch.arange(prompt) >= prompt - prompts, torch.arange(response) < responses
    attention = torch.cat([left, right], dim=1).long()
    mask = attention[:, prompt:].clone()
    mask[[*masked]] = 0
    ids = torch.randint(1, VOCABULARY, attention.shape, generator=draw) * attention
    last = torch.arange(response) == responses - 1
    tensors = {
        "prompts": ids[:, :prompt],
        "responses": ids[:, prompt:],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": mask,
        "rollout_log_probs": (-torch.rand(mask.shape, generator=draw) - 8.0) * mask,
        "rm_scores": torch.rand(rows, 1, generator=draw) * last,
    }
    return {name: tensor.tolist() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    """(verl's, ours): by run and step."""
    policy, critic = (tmp_path_factory.mktemp(name) for name in ("policy", "critic"))
    write_models(policy, critic)
    whole = [batch(0), batch(1)]
    odd = [batch(0, empty=(2,), masked=(5,)), batch(1, empty=(0, 1, 2), masked=(3,))]
    given = {"policy": str(policy), "critic": str(critic), "batches": [whole, whole, odd, whole]}
    verls = computed("take_steps.py", {**given, "runs": RUNS}, VERL)
    given["batches"].append([batch(0, masked=range(8)), batch(1, empty=range(8))])
    options = [[f"{key}={value}" for key, value in run.items()] for run in (*OUR_RUNS, OUR_RUNS[2])]
    return verls, computed("take_our_steps.py", {**given, "runs": options}, OURS)


def write_models(policy: Path, critic: Path) -> None:
    config = Qwen2Config(vocab_size=VOCABULARY, num_labels=1, **SIZES)
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(policy)
    Qwen2ForTokenClassification(config).save_pretrained(critic)
    build_tokenizer(VOCABULARY).save_pretrained(policy)


@pytest.mark.parametrize("run", [0, 1], ids=["grpo", "ppo"])
def test_every_metric_that_verl_logs_in_a_step_is_logged_here_or_listed(both: Any, run: int) -> None:
    for verls, ours in zip(both[0][run], both[1][run], strict=True):
        missing = verls.keys() - ours.keys()
        listed = {name for name in missing for parts in OWN_NAMES.values() if any(part in name for part in parts)}
        assert missing == listed


def test_what_verl_logs_and_we_do_not_is_listed_with_the_reason(both: Any) -> None:
    [*_, verls], [*_, ours] = both[0][1], both[1][1]
    for difference, parts in OWN_NAMES.items():
        assert differences()[difference]["why"]
        assert any(part in name for part in parts for name in verls.keys() - ours.keys()), difference


@pytest.mark.parametrize("run", [0, 1], ids=["grpo", "ppo"])
def test_a_metric_of_a_step_that_has_verls_name_has_its_value(both: Any, run: int) -> None:
    """In the second step, too, which has what the first has learned. All is computed in float32 on both sides."""
    for verls, ours in zip(both[0][run], both[1][run], strict=True):
        assert len(shared(verls, ours)) > 50
        assert differing(verls, ours) == set()


def shared(verls: dict[str, Any], ours: dict[str, Any]) -> set[str]:
    return {name for name in verls.keys() & ours.keys() if not name.startswith((*MEASURED, *RATES))}


def differing(verls: dict[str, Any], ours: dict[str, Any]) -> set[str]:
    """Of the metrics that both have, those with another value, None (NaN) for one."""
    names = shared(verls, ours)
    return {name for name in names if verls[name] is None or ours[name] != pytest.approx(verls[name], 1e-3, 5e-5)}


def test_empty_responses_and_masked_rows_change_no_step(both: Any) -> None:
    """With KL in the reward and importance weights. In the second step a mini-batch has no token of the policy, which
    makes verl's means over mini-batches NaN; what is learned is equal, or the second step's numbers were not."""
    listed = ("`rollout_corr/*` beside empty responses", "KL in the reward beside empty responses")
    assert all(differences()[name]["why"] for name in (*listed, "a mini-batch without a token of the policy"))
    (verls, of_nothing), (ours, with_nothing) = both[0][2], both[1][2]
    assert len(shared(verls, ours)) > 80
    assert {name for name in differing(verls, ours) if not name.startswith("rollout_corr/")} == set()
    no_number = {name for name, value in of_nothing.items() if value is None}
    assert {name.split("/")[1] for name in no_number} == {"entropy_loss", "kl_loss", "loss", "pg_loss", "vf_loss"}
    others = {name for name in differing(of_nothing, with_nothing) if not name.startswith("rollout_corr/")}
    assert others == no_number | {"actor/reward_kl_penalty"}


def test_a_step_without_any_token_of_the_policy_learns_nothing(both: Any) -> None:
    """verl's ends with a ValueError."""
    for step in both[1][4]:
        assert [step[f"{role}/grad_norm"] for role in ("actor", "critic")] == [0.0, 0.0]
        assert all(isfinite(value) for value in step.values()), step


def test_metrics_of_several_micro_batches_are_listed_with_the_reason(both: Any) -> None:
    """Of one micro-batch they are equal."""
    assert differences()["metrics of a mini-batch in several micro-batches"]["why"]
    several, one = ([of_both[run] for of_both in both] for run in (1, 2))
    verls, ours = (step[1]["actor/ppo_kl"] for step in several)
    assert ours != pytest.approx(verls, rel=1e-2)
    for verls, ours in zip(*one, strict=True):
        assert ours["actor/ppo_kl"] == pytest.approx(verls["actor/ppo_kl"], rel=1e-2)


def test_what_else_rejection_changes_is_listed_with_the_reason(both: Any) -> None:
    assert differences()["what `rollout_rs` rejects, beside the policy's loss"]["why"]
    found = differing(both[0][3][0], both[1][3][0])
    assert {"critic/advantages/max", "critic/returns/mean", "critic/values/mean", "critic/vf_loss"} <= found
    assert not any(name.startswith("rollout_corr/") for name in found)


@pytest.mark.parametrize("name", RATES)
def test_which_step_a_learning_rate_is_told_of_is_listed_with_the_reason(both: Any, name: str) -> None:
    assert differences()["`actor/lr`, `critic/lr`"]["why"]
    verls, ours = ([step[name] for step in of_run[1]] for of_run in both)
    assert ours == pytest.approx([1e-3, verls[0]])
    assert verls[1] < verls[0] < 1e-3
