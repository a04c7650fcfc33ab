"""The interface between the rollout server and one inference engine, and the record from which an engine is built."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from verl.checkpoint_engine.plan.types import EngineCheckResult
from verl.utils.config import ConfigError
from verl.utils.pictures import Medium
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.records import SamplingOptions, TokenOutput


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Everything that a server process needs to build its engine. Made on the driver, pickled to the server."""

    name: str
    """The replica's, for messages."""
    engine: str
    """"module:Class" of an `Engine`."""
    config: RolloutConfig
    model: HFModelConfig
    """`path` is a local Hugging Face directory."""
    device: str
    max_model_len: int
    seed: int
    """Differs between replicas, so that two of them do not sample the same responses."""
    local_index: int = 0
    """Index of this replica among the `local_count` replicas on its machine; they divide the CPU cores."""
    local_count: int = 1
    can_sleep: bool = False


class Engine(Protocol):
    """One inference engine. Every method runs on the server's engine loop, never from two threads.

    The server guarantees: `start` first and once; `activate` only while paused; `generate` only with whole weights.
    """

    async def start(self) -> Collection[str] | None:
        """Load the model; return when `generate` would work.

        Returns the tensors of the model's directory that the engine keeps in float32 at any `rollout.dtype`: trainers
        send those in their own dtype. May be empty.
        """

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOptions, request_id: str) -> TokenOutput:
        """Sample one response. Cancelling it ends the request in the engine."""

    async def pause(self, mode: str) -> None:
        """Stop generating; return when no step is running. New requests queue up until `resume`. Idempotent.

        `abort` ends requests in flight with their tokens so far, `wait` lets them finish, `keep` freezes them.
        """

    async def resume(self) -> None:
        """Generate again. Idempotent."""

    async def activate(self, arena_path: str, version: int) -> EngineCheckResult | None:
        """Load every weight of `version` from the arena and forget caches computed with older weights.

        Returns the result of the engine's check of `version`; None without a check. Raises IntegrityError naming the
        tensors that differ.
        """

    async def clear_cache(self) -> None:
        """Forget cached prefixes."""

    async def sleep(self, *, weights: bool) -> None:
        """Free the KV cache on the device, and with `weights` the weights (their values are lost)."""

    async def wake(self, *, weights: bool) -> None:
        """Allocate again what `sleep` freed: the weights (with undefined values) or the KV cache."""

    async def health(self) -> None:
        """Return if the engine answers; otherwise raise ReplicaDied or the engine's error."""

    async def shutdown(self) -> None:
        """End every process and thread of the engine."""


@runtime_checkable
class SeeingEngine(Protocol):
    """An engine that supports pictures in prompts."""

    sees: Literal[True]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingOptions, request_id: str, pictures: Sequence[Medium] = ()
    ) -> TokenOutput:
        """As `Engine.generate`. The prompt includes the tokens of its pictures."""


@runtime_checkable
class KeepingEngine(Protocol):
    """An engine that can keep KV caches across versions: `rollout.kv_across_versions`."""

    keeps: Literal[True]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingOptions, request_id: str, *, cache: str | None = None
    ) -> TokenOutput:
        """As `Engine.generate`. `cache` is that of an earlier output of this conversation, by any engine."""


@runtime_checkable
class TellingEngine(Protocol):
    """An engine that tells what it has sampled so far, for requests that go on elsewhere if it dies."""

    tells: Literal[True]

    def so_far(self, request_id: str, known: int) -> TokenOutput | None:
        """The tokens after the first `known` of a response that is not finished, with their log-probs, versions, and
        experts where those are recorded, as an output that is `died`. Its spans begin at 0, and its experts after those
        of the known tokens. None: there are no more, or the rest of such a response is not to be sampled elsewhere."""


@runtime_checkable
class TracedEngine(Protocol):
    """An engine that can write traces of its computation to `rollout.profiler.save_path`."""

    async def start_profile(self, prefix: str) -> None:
        """Trace from here on; names of files begin with `prefix`."""

    async def stop_profile(self) -> None:
        """Write the trace."""


def ends_of_files(directory: Path) -> set[int]:
    """The tokens that end a response by the generation config and the model config in `directory`. Raises ConfigError
    for a file that is no JSON, or names something else than ids."""
    ids: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        if (directory / file).exists():
            try:
                ids |= _as_set(json.loads((directory / file).read_text("utf-8")).get("eos_token_id"))
            except (ValueError, TypeError, AttributeError) as exc:
                raise ConfigError(f"{directory / file} is damaged: {exc}") from exc
    return ids


def eos_token_ids(model: HFModelConfig) -> tuple[int, ...]:
    """The tokens that end a response: those of the generation config, the model config and the tokenizer.

    Chat models often end a turn with another token than the one in the model config, so the union is taken. Raises
    ConfigError for a file that is no JSON, or names something else than ids.
    """
    ids = ends_of_files(Path(model.path))
    tokenizer_directory = Path(model.tokenizer_path or model.path)
    if (tokenizer_directory / "tokenizer_config.json").exists():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory, trust_remote_code=model.trust_remote_code)
        ids |= _as_set(tokenizer.eos_token_id)
    return tuple(sorted(ids))


def _as_set(value: Any) -> set[int]:
    if value is None:
        return set()
    ids = {value} if isinstance(value, int) else set(value)
    if not all(isinstance(number, int) for number in ids):
        raise TypeError(f"eos_token_id is {value!r}, no token id and no list of them")
    return ids
