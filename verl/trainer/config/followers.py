"""Keys that follow others while they are null: as in verl, reference, engines and critic follow the actor.

The keys of `OF_BUILTIN` follow the model and the data. Values that suit the built-in ones would train others
differently from verl.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import reduce
from typing import Any

from verl.trainer.config.from_verl.rules import known_to_verl
from verl.trainer.config.from_verl.translation import Note
from verl.utils.builtin import SEEING_MODEL, SHAPES, is_builtin
from verl.utils.model import ATTENTION, EXACT
from verl.workers.config import ActorConfig, DataConfig, HFModelConfig, PPOConfig

_SPLIT = "context_parallel_size"
_SHARED = "ulysses_sequence_parallel_size"

OF_BUILTIN = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.n",
    "algorithm.adv_estimator",
    "trainer.test_freq",
)
"""Keys whose defaults suit the built-in model on built-in data. With another model or other data, verl's hold."""
NULL = "critic.loss_scale_factor"
"""A key whose null on the command line is a value: its own default, not the actor's, as in verl."""
FOLLOWING_ACTOR = ("ppo_max_token_len_per_gpu", "ppo_epochs", "shuffle", "loss_agg_mode", "loss_scale_factor")


def with_followers(values: Mapping[str, Any], notes: list[Note], explicit: Collection[str] = ()) -> dict[str, Any]:
    """`values` with all following keys set. Adds a note on every other change to `notes`.

    `explicit` are the keys that the command line set.
    """
    filled: dict[str, Any] = _copy(values)
    policy = _section(filled, "actor_rollout_ref")
    actor, rollout, ref = (_section(policy, name) for name in ("actor", "rollout", "ref"))
    critic = _section(filled, "critic")
    _fill_by_model_and_data(filled)
    _fill(actor, "use_dynamic_bsz", actor.get("ppo_micro_batch_size_per_gpu") is None)
    _fill(actor, "ppo_max_token_len_per_gpu", ActorConfig.ppo_max_token_len_per_gpu)
    for section in (rollout, ref):
        dynamic = actor["use_dynamic_bsz"] or section.get("log_prob_micro_batch_size_per_gpu") is None
        _fill(section, "log_prob_use_dynamic_bsz", dynamic)
        _fill(section, "log_prob_max_token_len_per_gpu", actor["ppo_max_token_len_per_gpu"])
    _fill(critic, "use_dynamic_bsz", actor["use_dynamic_bsz"] or critic.get("ppo_micro_batch_size_per_gpu") is None)
    for name in FOLLOWING_ACTOR:
        if actor.get(name) is not None and not (f"critic.{name}" == NULL and NULL in explicit):
            _fill(critic, name, actor[name])
    if rollout.get("exact"):
        _fill(_section(_section(policy, "model"), "override_config"), ATTENTION, EXACT)
    if _section(filled, "trainer").get("full_determinism") is True:
        rollout["full_determinism"] = True
    _fill(critic, "strategy", "megatron" if actor.get("strategy") == "megatron" else "fsdp2")
    _share(filled)
    if any(note.costs and note.key.endswith(_SPLIT) for note in notes):
        _raise_budgets(filled, notes)
    return filled


def _fill_by_model_and_data(values: dict[str, Any]) -> None:
    data = _section(values, "data")
    train_files = data.get("train_files", DataConfig.train_files)
    of_data, of_shapes = _all_builtin(train_files), train_files in (SHAPES, [SHAPES])
    _fill(data, "val_files", (SHAPES if of_shapes else DataConfig.val_files) if of_data else [])
    model = _section(_section(values, "actor_rollout_ref"), "model")
    _fill(model, "path", SEEING_MODEL if of_shapes else HFModelConfig.path)
    builtin = of_data and _all_builtin(model.get("path", HFModelConfig.path))
    for path in OF_BUILTIN:
        *names, last = path.split(".")
        ours = reduce(getattr, (*names, last), PPOConfig())
        _fill(reduce(_section, names, values), last, ours if builtin else known_to_verl()[path][0])


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
    given = (_section(values, "data").get(name) for name in ("max_prompt_length", "max_response_length"))
    lengths = [length for length in given if isinstance(length, int)]
    if len(lengths) < 2:  # its own line says what is wrong
        return
    longest = sum(lengths)
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


def _all_builtin(names: Any) -> bool:
    """Whether a model, or all files, are the project's own."""
    given = names if isinstance(names, list) else [names]
    return all(isinstance(name, str) and is_builtin(name) for name in given)


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
