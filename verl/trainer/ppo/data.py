"""The driver reads, checks and counts the prompts of a job before any process starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.trainer.ppo.dynamic_sampling import generation_batch_size
from verl.utils.config import ConfigError
from verl.utils.dataset import PromptLoader, build_dataloader, build_dataset, fingerprint, resolve_data_files
from verl.utils.dataset.rl_dataset import Partners, ShownTools
from verl.utils.pictures import PictureProcessor
from verl.utils.reward_score.default import no_rule, rule_for
from verl.workers.config import PPOConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def build_dataloaders(
    config: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    agent_loop_manager_class: Any,
    processor: PictureProcessor | None = None,
) -> dict[str, PromptLoader]:
    """Loaders of the splits `train` and `val`. `processor` is that of a multimodal model. Raises ConfigError for
    unusable data."""
    data = config.data
    shown_tools = _shown_tools(config, tokenizer, agent_loop_manager_class)
    given_files = {"train": data.train_files, "val": data.val_files}
    files = {split: resolve_data_files(given, split) for split, given in given_files.items()}
    datasets: dict[str, Any] = {}
    for split in files:
        datasets[split] = build_dataset(
            files[split],
            tokenizer,
            data,
            split,
            shown_tools=shown_tools,
            processor=processor,
        )
        require_seen(config, datasets[split], agent_loop_manager_class)
        if config.custom_reward_function.path is None:
            require_rewards(config, datasets[split], agent_loop_manager_class)
        else:
            _warn_without_truths(datasets[split], split)
    train, val = datasets["train"], datasets["val"]
    batch_size = generation_batch_size(config)
    if batch_size < 1:
        raise ConfigError("data.train_batch_size=0 is for fully_async_main alone: set it to the prompts of a step")
    if len(train) < batch_size:
        key = "gen_batch_size" if batch_size != data.train_batch_size else "train_batch_size"
        raise ConfigError(f"data.{key}={batch_size} exceeds the {len(train)} training samples")
    return {
        "train": build_dataloader(
            train,
            data,
            batch_size=batch_size,
            shuffle=data.shuffle,
            drop_last=True,
            source=fingerprint(files["train"]),
        ),
        "val": build_dataloader(val, data, batch_size=data.val_batch_size or len(val), shuffle=False),
    }


def _shown_tools(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, agent_loop_manager_class: Any
) -> ShownTools | None:
    """Asked once per agent of the samples, so that it can look at the tokenizer, too."""
    shown_tools = getattr(agent_loop_manager_class, "shown_tools", None)
    check_tokenizer = getattr(agent_loop_manager_class, "check_tokenizer", None)
    if shown_tools is None:
        return None

    def checked(agent_name: str | None) -> Sequence[Any]:
        if check_tokenizer is not None:
            check_tokenizer(config, agent_name, tokenizer)
        found: Sequence[Any] = shown_tools(config, agent_name)
        return found

    return checked


def unheard_interactions(
    config: PPOConfig, loaders: Mapping[str, PromptLoader], agent_loop_manager_class: Any
) -> list[str]:
    """Warnings about interactions that samples or the configuration name, but no agent loop uses.

    Raises ConfigError for samples that would be generated without their interaction. Not checked: custom data sets
    without `partners`, and managers without `unheard_interactions`.
    """
    look = getattr(agent_loop_manager_class, "unheard_interactions", None)
    partners = [getattr(loader.dataset, "partners", {}) for loader in loaders.values()]
    agents = {agent for of_split in partners for agent in of_split}
    found: dict[str | None, Partners] = {}
    for agent in agents:
        each = [of_split[agent] for of_split in partners if agent in of_split]
        first = next((one.first for one in each if one.first), "")
        found[agent] = Partners(sum(one.count for one in each), first)
    warnings: list[str] = [] if look is None else look(config, found)
    return warnings


def require_seen(config: PPOConfig, dataset: Any, agent_loop_manager_class: Any) -> None:
    """Raises ConfigError if samples have pictures that the agent loop, the reward model or a teacher would not see, and
    for videos with SGLang."""
    policy = config.actor_rollout_ref
    if (place := getattr(dataset, "filmed", "")) and policy.rollout.name == "sglang":
        raise ConfigError(
            f"{place}: the sample has a video, which SGLang does not get: set actor_rollout_ref.rollout.name=hf"
        )
    for agent, place in getattr(dataset, "pictured", {}).items():
        sees = getattr(agent_loop_manager_class, "sees", None)
        if sees is None or not sees(config, agent):
            what = f"agent_name={agent}" if agent else "the agent loop of samples that name none"
            raise ConfigError(f"{place}: the sample has pictures, which {what} does not show to the policy")
        if config.reward_model.enable:
            raise ConfigError(f"{place}: the sample has pictures, which the reward model does not see")
        if config.distillation.enabled:
            raise ConfigError(f"{place}: the sample has pictures, which teachers do not see")


def require_rewards(config: PPOConfig, dataset: Any, agent_loop_manager_class: Any) -> None:
    """Raises ConfigError for a sample that neither its agent loop nor a built-in rule can reward: no rule for its
    source, or no ground truth.

    Custom data sets without an attribute `sources` are not checked.
    """
    key = config.data.reward_fn_key
    rewards = getattr(agent_loop_manager_class, "rewards", lambda *_: False)
    for name, source in getattr(dataset, "sources", {}).items():
        if source.agents and all(rewards(config, agent) for agent in source.agents):
            continue
        if rule_for(name) is None:
            what = f"{key}={name!r}, which {source.count} samples have"
            raise ConfigError(f"{source.first}: {no_rule(what, name)}")
        if source.without_truth:
            raise ConfigError(
                f"{source.first}: reward_model.ground_truth is empty in {source.without_truth} of the {source.count} "
                f"samples of {key}={name!r}, so no response could be right"
            )


def _warn_without_truths(dataset: Any, split: str) -> None:
    """A function of the user's own may need none."""
    sources = getattr(dataset, "sources", {}).values()
    if sources and all(source.without_truth == source.count for source in sources):
        logger.warning("reward_model.ground_truth is empty in all %s samples", split)
