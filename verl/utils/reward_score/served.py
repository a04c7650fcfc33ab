"""Reward functions that use a reward model, which engines serve over HTTP.

They run in the processes of `pool`, which import neither torch nor Ray.
"""

from __future__ import annotations

import http.client
import inspect
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.utils.config import ConfigError
from verl.utils.reward_score.loading import FileFunction, RewardFunction

ADDRESS, TOKENIZER = "reward_router_address", "reward_model_tokenizer"
PROMPT = "raw_prompt"
"""The key of `extra_info` with the messages of the prompt."""
_calls = itertools.count(os.getpid())


class RewardModelError(RuntimeError):
    """The reward model gave an error or an invalid answer."""


class AskedFunction:
    """A user's reward function that gets the address of an engine, and the reward model's tokenizer.

    With several identical engines, calls use them by turns. `addresses` is the file that lists them once they run.
    """

    def __init__(self, function: RewardFunction, addresses: Path, tokenizer: str) -> None:
        """Raises ConfigError for a function that accepts neither argument."""
        self._recipe = (function, addresses, tokenizer)
        taken = inspect.signature(function.function if isinstance(function, FileFunction) else function).parameters
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        self._names = [name for name in (ADDRESS, TOKENIZER) if anything or name in taken]
        if not self._names:
            raise ConfigError(
                f"reward_model.enable=true, but the function of custom_reward_function does not take {ADDRESS}: it "
                "cannot call the reward model"
            )
        self._tokenizer: Any = None

    def __call__(self, **arguments: Any) -> Any:
        function, addresses, tokenizer = self._recipe
        given: dict[str, Any] = {}
        if ADDRESS in self._names:
            given[ADDRESS] = next_address(addresses)
        if TOKENIZER in self._names:
            if self._tokenizer is None:
                from transformers import AutoTokenizer  # for functions that ask for it alone: it takes seconds

                self._tokenizer = AutoTokenizer.from_pretrained(tokenizer)
            given[TOKENIZER] = self._tokenizer
        return function(**arguments, **given)

    def __reduce__(self) -> tuple[type[AskedFunction], tuple[RewardFunction, Path, str]]:
        return AskedFunction, self._recipe


class ScoredByModel:
    """The reward function of a model with a head: the model's score of the conversation up to the response."""

    def __init__(self, addresses: Path, timeout_s: float) -> None:
        self._recipe = (addresses, timeout_s)

    def __call__(self, *, solution_str: str, extra_info: Mapping[str, Any], **_: Any) -> float:
        addresses, timeout_s = self._recipe
        messages = [*extra_info[PROMPT], {"role": "assistant", "content": solution_str}]
        return score(next_address(addresses), messages, timeout_s=timeout_s)

    def __reduce__(self) -> tuple[type[ScoredByModel], tuple[Path, float]]:
        return ScoredByModel, self._recipe


def next_address(addresses: Path) -> str:
    known = json.loads(addresses.read_text(encoding="utf-8"))
    return str(known[next(_calls) % len(known)])


def score(address: str, messages: Sequence[Mapping[str, Any]], *, timeout_s: float) -> float:
    """The output of the head of the model at `address`, without an activation; of several labels the last one.

    Raises RewardModelError with the engine's message.
    """
    asked = {"messages": list(messages), "use_activation": False, "add_generation_prompt": False}
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("POST", "/classify", json.dumps(asked), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except OSError as exc:
        raise RewardModelError(f"the reward model at {address} does not answer: {exc}") from exc
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise RewardModelError(f"the reward model at {address} answers {response.status}: {text[:500]}")
    return float(json.loads(text)["data"][0]["probs"][-1])
