"""Keys that follow others where they are null: as verl's do, the reference, the engines and the critic the actor.

And two that follow the model and the data: what suits those that come with the project would train others otherwise
than verl does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.trainer.config.from_verl.translation import Note
from verl.utils.builtin import PREFIX
from verl.workers.config import ActorConfig, DataConfig, HFModelConfig, RolloutConfig

_SPLIT = "context_parallel_size"
_SHARED = "ulysses_sequence_parallel_size"


FOLLOWING_ACTOR = ("ppo_max_token_len_per_gpu", "ppo_epochs", "shuffle", "loss_agg_mode", "loss_scale_factor")


def with_followers(values: Mapping[str, Any], notes: list[Note]) -> dict[str, Any]:
    """`values` with every key that follows others set. What was changed beyond that is added to `notes`."""
    filled: dict[str, Any] = _copy(values)
    policy = _section(filled, "actor_rollout_ref")
    actor, rollout, ref = (_section(policy, name) for name in ("actor", "rollout", "ref"))
    critic = _section(filled, "critic")
    builtin = _is_builtin(filled)
    _fill(_section(filled, "algorithm"), "adv_estimator", "grpo" if builtin else "gae")
    _fill(rollout, "n", RolloutConfig.n if builtin else 1)
    _fill(actor, "use_dynamic_bsz", actor.get("ppo_micro_batch_size_per_gpu") is None)
    _fill(actor, "ppo_max_token_len_per_gpu", ActorConfig.ppo_max_token_len_per_gpu)
    for section in (rollout, ref):
        dynamic = actor["use_dynamic_bsz"] or section.get("log_prob_micro_batch_size_per_gpu") is None
        _fill(section, "log_prob_use_dynamic_bsz", dynamic)
        _fill(section, "log_prob_max_token_len_per_gpu", actor["ppo_max_token_len_per_gpu"])
    _fill(critic, "use_dynamic_bsz", actor["use_dynamic_bsz"] or critic.get("ppo_micro_batch_size_per_gpu") is None)
    for name in FOLLOWING_ACTOR:
        if actor.get(name) is not None:
            _fill(critic, name, actor[name])
    _fill(critic, "strategy", "megatron" if actor.get("strategy") == "megatron" else "fsdp2")
    _share(filled)
    if any(note.costs and note.key.endswith(_SPLIT) for note in notes):
        _raise_budgets(filled, notes)
    return filled


def _share(values: dict[str, Any]) -> None:
    """Ranks that share sequences have them in one row, without padding."""
    policy, critic = values["actor_rollout_ref"], values["critic"]
    sections = [_section(policy[name], "fsdp_config") for name in ("actor", "ref")]
    _fill(sections[0], _SHARED, 1)
    _fill(sections[1], _SHARED, sections[0][_SHARED])
    _fill(fsdp := _section(critic, "fsdp"), _SHARED, 1)
    padding = "use_remove_padding"
    _fill(_section(policy, "model"), padding, any(section[_SHARED] != 1 for section in sections))
    _fill(_section(critic, "model"), padding, fsdp[_SHARED] != 1)


def _raise_budgets(values: dict[str, Any], notes: list[Note]) -> None:
    """Budgets of ranks that share sequences may be less than one whole sequence."""
    data = values.get("data") or {}
    longest = (data.get("max_prompt_length") or DataConfig.max_prompt_length) + (
        data.get("max_response_length") or DataConfig.max_response_length
    )
    policy = values["actor_rollout_ref"]
    for path, section, name in (
        ("actor_rollout_ref.actor", policy["actor"], "ppo_max_token_len_per_gpu"),
        ("actor_rollout_ref.rollout", policy["rollout"], "log_prob_max_token_len_per_gpu"),
        ("actor_rollout_ref.ref", policy["ref"], "log_prob_max_token_len_per_gpu"),
        ("critic", values["critic"], "ppo_max_token_len_per_gpu"),
    ):
        budget = section[name]
        if isinstance(budget, int) and budget < longest:
            why = f"raised to {longest}, the longest sequence, which one rank computes"
            notes.append(Note(key=f"{path}.{name}", value=budget, why=why, costs=True))
            section[name] = longest


def _is_builtin(values: Mapping[str, Any]) -> bool:
    """Whether model and training data are the project's own. Who brings others means verl's defaults."""
    model = ((values.get("actor_rollout_ref") or {}).get("model") or {}).get("path", HFModelConfig.path)
    files = (values.get("data") or {}).get("train_files", DataConfig.train_files)
    return all(isinstance(name, str) and name.startswith(PREFIX) for name in (model, files))


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Made if it is not there; what stands in its place and is no section is not followed."""
    if values.get(name) is None:
        return values.setdefault(name, {}) if name not in values else {}
    found = values[name]
    return found if isinstance(found, dict) else {}


def _fill(section: dict[str, Any], name: str, value: Any) -> None:
    if section.get(name) is None:
        section[name] = value


def _copy(values: Any) -> Any:
    return {key: _copy(value) for key, value in values.items()} if isinstance(values, Mapping) else values
