"""The reward function that a configuration asks for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from verl.utils.config import ConfigError
from verl.utils.reward_score.default import default_compute_score
from verl.utils.user_code import load_from_file

KEY = "custom_reward_function"
DEFAULT_NAME = "compute_score"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
RewardFunction = Callable[..., Any]
"""`(*, data_source, solution_str, ground_truth, extra_info) -> float | dict with "score"`, called by keyword."""


class RewardFunctionSettings(Protocol):
    """The part of `verl.workers.config.CustomRewardFunctionConfig` that is needed here."""

    @property
    def path(self) -> str | None: ...
    @property
    def name(self) -> str: ...
    @property
    def reward_kwargs(self) -> dict[str, Any]: ...


def load_reward_function(config: RewardFunctionSettings) -> RewardFunction:
    """The user's function with `reward_kwargs` bound, or `default_compute_score` if no path is set.

    Raises ConfigError if the file or the name is missing, if it is no plain function, or if it does not take the
    arguments.
    """
    if config.path is None:
        if config.reward_kwargs:
            raise ConfigError(
                f"{KEY}.reward_kwargs is set, but {KEY}.path is not: there is no function to pass them to"
            )
        if config.name != DEFAULT_NAME:
            raise ConfigError(f"{KEY}.name={config.name} is set, but {KEY}.path is not: in which file is it?")
        return default_compute_score
    function = load_from_file(config.path, config.name, key=KEY)
    if not callable(function):
        raise ConfigError(f"{KEY}.name={config.name!r} in {config.path} is {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{KEY}.name={config.name!r} in {config.path} is async; a reward function is a plain `def`")
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS), **config.reward_kwargs)
    except TypeError as exc:
        expected = ", ".join([*ARGUMENTS, *config.reward_kwargs])
        raise ConfigError(f"{config.path}: {config.name}{signature} cannot take ({expected}) by name: {exc}") from exc
    return functools.partial(function, **config.reward_kwargs) if config.reward_kwargs else function
