"""Loads and calls a run's reward function and manager, under verl's names."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from verl.protocol import DataProto
from verl.trainer.fleet.reward_models import reward_function
from verl.utils.chat_template import turns_of
from verl.utils.config import ConfigError, did_you_mean
from verl.utils.model import resolve_model_path
from verl.utils.reward_score import RewardFunction, load_reward_function
from verl.workers.config import PPOConfig
from verl.workers.config.algorithm import RewardKwargsConfig
from verl.workers.reward_manager import (
    NaiveRewardManager,
    OwnRewardManager,
    RewardManager,
    get_reward_manager_cls,
    overlong_penalty,
)
from verl.workers.rollout.engine import eos_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def get_custom_reward_fn(config: PPOConfig) -> RewardFunction | None:
    """The function of `custom_reward_function.path` with its `reward_kwargs` bound; None if there is none.

    Raises ConfigError as `load_reward_function` does.
    """
    settings = config.custom_reward_function
    return load_reward_function(settings) if settings.path is not None else None


def load_reward_manager(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, **reward_kwargs: Any) -> RewardManager:
    """The built-in or custom manager that `reward_model.reward_manager` names. Raises ConfigError.

    `reward_kwargs` override those of `reward_model.reward_kwargs`.
    """
    config = _with(config, reward_kwargs)
    settings, function = config.reward_model, reward_function(config)
    if get_reward_manager_cls(settings.reward_manager) is not NaiveRewardManager:
        return OwnRewardManager(settings.reward_manager, tokenizer, function, config.data.reward_fn_key, config)
    return NaiveRewardManager(
        tokenizer,
        function,
        num_workers=settings.num_workers,
        reward_fn_key=config.data.reward_fn_key,
        timeout_s=settings.timeout_s,
        keep_special_tokens=settings.keep_special_tokens,
        end_token_ids=_end_token_ids(config, tokenizer),
        penalty=overlong_penalty(settings, config.data.max_response_length),
        shows_prompts=settings.enable,
        told={"experiment_name": config.trainer.experiment_name} if settings.reward_manager == "gdpo" else None,
    )


def compute_reward(data: DataProto, reward_fn: Any) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    """Rewards [B, R] and further numbers of each response, from a manager with our interface or verl's."""
    if isinstance(reward_fn, NaiveRewardManager | OwnRewardManager):
        found = reward_fn(data)
        return found.reward_tensor, found.extra_info
    result = reward_fn(data, return_dict=True)
    return result["reward_tensor"], dict(result.get("reward_extra_info") or {})


def _with(config: PPOConfig, reward_kwargs: dict[str, Any]) -> PPOConfig:
    known = [field.name for field in fields(RewardKwargsConfig)]
    for name in reward_kwargs:
        if name not in known:
            raise ConfigError(f"load_reward_manager({name}=...): no such argument.{did_you_mean(name, known)}")
    settings = config.reward_model
    kwargs = replace(settings.reward_kwargs, **reward_kwargs)
    return replace(config, reward_model=replace(settings, reward_kwargs=kwargs))


def _end_token_ids(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """What may end a response: as the model's files say, and as the chat template ends a message."""
    template = turns_of(tokenizer, None, config.data.apply_chat_template_kwargs)
    model = config.actor_rollout_ref.model
    return {*eos_token_ids(model.at(resolve_model_path(model.path))), *template.stop_token_ids}
