"""Users' reward managers, with verl's interface."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Self

import torch

from verl.checkpoint_engine.support.registry import Registry, require_keywords
from verl.protocol import DataProto, tensors_of
from verl.utils.config import ConfigError
from verl.utils.plain import plain
from verl.workers.reward_manager.naive import GivenUp, NaiveRewardManager, RewardError, RewardOutput
from verl.workers.reward_manager.one_by_one import OneByOne

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.utils.reward_score import RewardFunction
    from verl.workers.config import PPOConfig

KEY = "reward_model.reward_manager"
REWARD_MANAGERS: Registry[Any] = Registry(KEY)
ARGUMENTS = ("tokenizer", "num_examine", "compute_score", "reward_fn_key")
ARGUMENTS_ONE_BY_ONE = ("config", "tokenizer", "compute_score")
"""The constructor arguments of a class with `run_single`."""
register = REWARD_MANAGERS.register
"""Class decorator: `reward_model.reward_manager=name` takes this class. It is made from `ARGUMENTS`, and called with a
batch and `return_dict=True`."""
for name in ("naive", "prime", "remote", "dapo", "gdpo"):
    # dapo subtracts a penalty; prime and remote are verl's naive one in other processes; gdpo's estimator reads other
    # numbers
    register(name)(NaiveRewardManager)
REFUSED = {
    "batch": "it calls the function with all samples at once, and verl 0.9's trainers have none either. Let the "
    "function take one sample, in reward_model.num_workers processes, or register a class whose __call__ takes a batch",
    "rate_limited": "let the function itself wait; reward_model.num_workers bounds how many samples are scored at once",
}
"""verl's managers that are refused, and what to use instead."""


def get_reward_manager_cls(name: str) -> Any:
    """The class of that name. Raises ConfigError for an unknown name, and for a class without verl's interface."""
    if name in REFUSED and name not in REWARD_MANAGERS.functions:
        raise ConfigError(f"{KEY}={name} is not here: {REFUSED[name]}")
    found = REWARD_MANAGERS.get(name)
    if found is NaiveRewardManager:
        return found
    if hasattr(found, "run_single"):
        require_keywords(found, ARGUMENTS_ONE_BY_ONE, f"{KEY}={name}")
        return found
    require_keywords(found, ARGUMENTS, f"{KEY}={name}")
    signature = inspect.signature(found.__call__)
    try:
        signature.bind(None, None, return_dict=True)
    except TypeError as exc:
        raise ConfigError(f"{KEY}={name}: __call__{signature} cannot take (data, return_dict=True): {exc}") from exc
    return found


class OwnRewardManager:
    """A reward manager around a registered class. It runs in the driver's process."""

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        compute_score: RewardFunction,
        reward_fn_key: str,
        config: PPOConfig | None = None,
    ) -> None:
        """Raises ConfigError as `get_reward_manager_cls` does."""
        self._name = name
        self._tokenizer = tokenizer
        self._manager: Any
        found = get_reward_manager_cls(name)
        if hasattr(found, "run_single"):
            self._manager = OneByOne(found(config=config, tokenizer=tokenizer, compute_score=compute_score))
        else:
            self._manager = found(
                tokenizer=tokenizer, num_examine=0, compute_score=compute_score, reward_fn_key=reward_fn_key
            )

    def __call__(self, data: DataProto, given_up: GivenUp | None = None) -> RewardOutput:
        """Score a batch. Raises RewardError for a manager's error or a result that is not [B, R]."""
        try:
            result = self._manager(data, return_dict=True)
        except Exception as exc:
            raise RewardError(f"{KEY}={self._name} raised {type(exc).__name__}: {exc}") from exc
        rewards = result.get("reward_tensor") if isinstance(result, dict) else result
        others = result.get("reward_extra_info") or {} if isinstance(result, dict) else {}
        responses, mask = tensors_of(data)["responses"], tensors_of(data)["attention_mask"]
        if not (isinstance(rewards, torch.Tensor) and rewards.shape == responses.shape and rewards.isfinite().all()):
            shown = f"a tensor {list(rewards.shape)}" if isinstance(rewards, torch.Tensor) else type(rewards).__name__
            raise RewardError(f"{KEY}={self._name} returned {shown}, not finite rewards {list(responses.shape)}")
        columns = {str(key): [plain(value) for value in values] for key, values in others.items()}
        if differing := {key: len(values) for key, values in columns.items() if len(values) != len(data)}:
            raise RewardError(
                f"{KEY}={self._name} returned {differing} values in reward_extra_info for {len(data)} samples"
            )
        lengths = mask[:, -responses.shape[1] :].sum(-1).tolist()
        texts = self._tokenizer.batch_decode(
            [row[:length].tolist() for row, length in zip(responses, lengths, strict=True)], skip_special_tokens=True
        )
        return RewardOutput(reward_tensor=rewards.float(), responses=texts, extra_info=columns)

    def close(self) -> None:
        if isinstance(self._manager, OneByOne):
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
