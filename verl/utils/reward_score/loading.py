"""Loads the reward function that a configuration names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from verl.utils.config import ConfigError
from verl.utils.reward_score.default import default_compute_score
from verl.utils.user_code import is_module, load_from_file

KEY = "custom_reward_function"
DEFAULT_NAME = "compute_score"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
RewardFunction = Callable[..., Any]
"""`(*, data_source, solution_str, ground_truth, extra_info) -> float | dict with "score"`, called by keyword.

The result may be awaitable."""


class RewardFunctionSettings(Protocol):
    """The part of `verl.workers.config.CustomRewardFunctionConfig` that is needed here."""

    @property
    def path(self) -> str | None: ...
    @property
    def name(self) -> str: ...
    @property
    def reward_kwargs(self) -> dict[str, Any]: ...


class FileFunction:
    """A function in a user's file, with `reward_kwargs` bound. Its pickle has the file's name, and loads it again."""

    def __init__(self, path: str, name: str, reward_kwargs: dict[str, Any]) -> None:
        """Raises ConfigError if the file or the name is missing, or the object is no function."""
        self._recipe = (path, name, reward_kwargs)
        self.function = load_from_file(path, name, key=KEY)
        if not callable(self.function):
            kind = type(self.function).__name__
            raise ConfigError(f"{KEY}.name={name!r} in {path} is {kind}, not a function")

    def __call__(self, **arguments: Any) -> Any:
        return self.function(**arguments, **self._recipe[2])

    def __reduce__(self) -> tuple[type[FileFunction], tuple[str, str, dict[str, Any]]]:
        return FileFunction, self._recipe


def load_reward_function(config: RewardFunctionSettings, also: Collection[str] = ()) -> RewardFunction:
    """The user's function with `reward_kwargs` bound, or `default_compute_score` if no path is set.

    `also` are further arguments, passed if the function has parameters of these names. Raises ConfigError if the file
    or the name is missing, if the object is no function, or if it does not accept the arguments.
    """
    if config.path is None:
        if config.reward_kwargs:
            raise ConfigError(
                f"{KEY}.reward_kwargs is set, but {KEY}.path is not: there is no function to pass them to"
            )
        if config.name != DEFAULT_NAME:
            raise ConfigError(f"{KEY}.name={config.name} is set, but {KEY}.path is not: in which file is it?")
        return default_compute_score
    path = config.path if is_module(config.path) else str(Path(config.path).expanduser().absolute())
    function = FileFunction(path, config.name, config.reward_kwargs)
    signature = inspect.signature(function.function)
    try:
        given = [name for name in also if name in signature.parameters]
        signature.bind(**dict.fromkeys([*ARGUMENTS, *given]), **config.reward_kwargs)
    except TypeError as exc:
        expected = ", ".join([*ARGUMENTS, *config.reward_kwargs])
        raise ConfigError(f"{config.path}: {config.name}{signature} cannot take ({expected}) by name: {exc}") from exc
    return function
