"""Checks whether two runs of a job can be the same run, where `trainer.full_determinism` asks for that."""

from __future__ import annotations

from collections.abc import Iterator

from verl.workers.config import PPOConfig

KEY = "trainer.full_determinism=true"


def full_determinism(config: PPOConfig) -> Iterator[str]:
    """Settings with which numbers would depend on what else was computed when, or that were not tried."""
    from verl.utils.device import resolve_device

    rollout = config.actor_rollout_ref.rollout
    if not config.trainer.full_determinism:
        if rollout.full_determinism:
            yield f"actor_rollout_ref.rollout.full_determinism=true follows {KEY}, which is of the whole run: set that"
        return
    if (device := resolve_device(config.trainer.device)) != "cpu":
        yield f"{KEY} needs trainer.device=cpu, not {device}, on which it has not been run"
    if rollout.name not in ("vllm", "hf"):
        yield f"{KEY} needs actor_rollout_ref.rollout.name=vllm or hf: {rollout.name} takes no seed per request"
    alone = rollout.max_num_seqs == 1 and (rollout.name == "hf" or not rollout.enable_prefix_caching)
    if not rollout.exact and not alone:
        cached = "" if rollout.name == "hf" else " and enable_prefix_caching=false"
        exact = "actor_rollout_ref.rollout.exact=true, or " if rollout.name == "vllm" else ""
        yield (
            f"{KEY} needs {exact}actor_rollout_ref.rollout.max_num_seqs=1{cached}: other requests beside a sample "
            "round it differently, and they come in any order"
        )
    for key, value in (
        ("reward_model.enable", config.reward_model.enable),
        ("distillation.enabled", config.distillation.enabled),
    ):
        if value:
            yield f"{KEY} does not go with {key}=true: its engines compute samples beside others, in order of arrival"
    if config.trainer.min_ranks is not None:
        yield f"{KEY} does not go with trainer.min_ranks={config.trainer.min_ranks}: fewer ranks sum in another order"
