"""The records between agent loops and rollout servers. No engine, no Ray, no torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from verl.workers.config.rollout import RolloutConfig

if TYPE_CHECKING:
    import numpy as np

NO_VERSION = -1
"""The version of tokens sampled from weights that the engine loaded itself (`load_format=auto`)."""

StopReason = Literal["completed", "length", "aborted", "died"]
PAUSE_MODES = ("abort", "wait", "keep")


class RolloutMode(Enum):
    """How a replica shares accelerators with the trainer, and whether its engine sleeps."""

    HYBRID = "hybrid"
    """The trainer's own accelerators, in turns: the engine sleeps while the trainer works."""
    COLOCATED = "colocated"
    """The same accelerators as other workers, at the same time: the engine claims none from Ray and never sleeps."""
    STANDALONE = "standalone"
    """Accelerators of its own, claimed from Ray; the engine never sleeps."""


NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0, "n": 1}
"""Sampling parameters that are not passed to engines, and their only permitted values, which have no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How one response is sampled, for any engine.

    Log-probs are those of the distribution that was sampled from: after temperature, top-k and top-p. Greedy
    (`temperature=0`) reports log-probs at temperature 1.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    logprobs: bool = True
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response, beside the model's own; the ending token is part of the response."""
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")

    def as_dict(self) -> dict[str, Any]:
        """The options under verl's names, as agent loops get them."""
        return asdict(self)

    @classmethod
    def of(cls, params: SamplingOptions | Mapping[str, Any]) -> SamplingOptions:
        """The inverse of `as_dict`. A dict of verl's may include NEUTRAL options, such as `repetition_penalty=1.0`.

        Raises ValueError for anything else, and without `max_tokens`.
        """
        if isinstance(params, SamplingOptions):
            return params
        known = {field.name for field in fields(cls)}
        unknown = {key: value for key, value in params.items() if key not in known}
        if asked := {key: value for key, value in unknown.items() if NEUTRAL.get(key, ...) != value}:
            raise ValueError(f"sampling_params: {asked} is not supported; known: {', '.join(sorted(known))}")
        if "max_tokens" not in params:
            raise ValueError("sampling_params lack max_tokens, the budget of the response")
        given = {key: value for key, value in params.items() if key in known}
        # 0 says in vLLM: the log-prob of the sampled token alone.
        given["logprobs"] = given.get("logprobs") is not None and given["logprobs"] is not False
        given["stop_token_ids"] = tuple(given.get("stop_token_ids") or ())
        return cls(**given)

    @classmethod
    def for_training(cls, rollout: RolloutConfig, *, max_tokens: int) -> SamplingOptions:
        return cls(
            max_tokens=max_tokens,
            temperature=rollout.temperature if rollout.do_sample else 0.0,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            logprobs=rollout.calculate_log_probs,
            ignore_eos=rollout.ignore_eos,
        )

    @classmethod
    def for_validation(cls, rollout: RolloutConfig, *, max_tokens: int) -> SamplingOptions:
        options = rollout.val_kwargs
        return cls(
            max_tokens=max_tokens,
            temperature=options.temperature if options.do_sample else 0.0,
            top_k=options.top_k,
            top_p=options.top_p,
            logprobs=False,
            ignore_eos=rollout.ignore_eos,
        )


@dataclass(frozen=True, slots=True)
class CallName:
    """Which answer a call is for. Another agent-loop worker asks for it under the same name if the first one dies."""

    owner: str
    """The worker's, which the one in its place has, too."""
    sample: Hashable
    asked: Hashable
    """The same for the same prompt and sampling, whatever the response already has."""
    max_tokens: int
    """Of the whole response."""
    start: int
    """Tokens that the response has already, at the end of the prompt."""


@dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """Response tokens `[start, stop)` were sampled from `version`."""

    start: int
    stop: int
    version: int
    replica: str = field(default="", compare=False)
    """The replica whose engine sampled them; its server sets it."""
    kv_version: int | None = None
    """The oldest version that may have computed keys and values that these tokens attend to; None: `version` did."""


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One response. `aborted`: the engine was told to stop; the tokens so far are valid and can be continued. `died`:
    the same of a response that the engine did not finish; agent loops get none."""

    token_ids: list[int]
    log_probs: list[float] | None
    """One per token, or None if not requested."""
    stop_reason: StopReason
    weight_versions: tuple[WeightVersionSpan, ...]
    """Cover all tokens, in order, without gaps."""
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    """Integers [tokens, layers, experts per token] of prompt and response, without the last token, which the engine has
    not processed; None if not requested."""
    cache: str | None = field(default=None, compare=False)
    """Names the engine's KV cache of this conversation, for later requests of it; None if versions share none."""
    cached_tokens: int = field(default=0, compare=False)
    """Tokens of the prompt whose keys and values were in the cache."""
    reusable: int = field(default=0, compare=False)
    """The first tokens of prompt and response that a later request finds in the cache, if the weights stay: those of
    whole blocks. 0 if the engine does not say."""
    computed_again: int = field(default=0, compare=False)
    """Tokens whose keys and values were computed a second time during this request, because the weights changed."""
    seen: tuple[str, ...] = ()
    """`PictureProcessor.digests` of the prompt's pictures, as the engine computed them."""

    def by(self, replica: str) -> TokenOutput:
        """A copy with `replica` as the one that sampled it."""
        return replace(self, weight_versions=tuple(replace(span, replica=replica) for span in self.weight_versions))

    def on_cache_of(self, version: int) -> TokenOutput:
        """A copy whose tokens attend to keys and values that may be as old as `version`."""
        spans = (replace(span, kv_version=min(version, span.version)) for span in self.weight_versions)
        return replace(self, weight_versions=tuple(spans))
