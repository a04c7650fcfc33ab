"""The result of one agent loop, and the response that grows meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from verl.utils.pictures import Picture, Video
from verl.workers.rollout.records import NO_VERSION, StopReason, TokenOutput

KINDS = {"images": Picture, "videos": Video}


@dataclass(slots=True, kw_only=True)
class AgentLoopMetrics:
    """verl's name for the seconds of one trajectory."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoopOutput:
    """One trajectory. The response holds what the policy generated and what tools answered, in order.

    Raises ValueError if its per-token lists differ in length.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    """1 where the policy generated the token, 0 where a tool's answer was inserted."""
    response_logprobs: list[float] | None = None
    """The rollout engine's log-probs, 0.0 on inserted tokens; None if not requested."""
    response_versions: list[int] | None = None
    """Version of the weights that generated each token; -1 on inserted tokens. If None, the worker fills in the
    versions that its servers reported, and -1 for unknown ones."""
    response_kv_versions: list[int] | None = None
    """The oldest version that may have computed keys and values that each token attends to; -1 on inserted tokens.
    Filled in as `response_versions`."""
    replicas: tuple[tuple[str, int, int], ...] = ()
    """(engine, start, stop) for response tokens `[start, stop)`, in order; empty if unknown."""
    num_turns: int = 0
    """Messages: the prompt counts as one, then every assistant message and every round of tool answers."""
    stop_reason: StopReason = "completed"
    """`completed`: the policy ended the response; `length`: the budget was used up; `aborted`: the engine ended it."""
    metrics: Mapping[str, float] | AgentLoopMetrics = field(default_factory=dict)
    """Seconds and counts of this trajectory: `generate_s`, `tools_s`, ..."""
    reward_score: float | None = None
    """The reward, if the loop knows it; the reward function is not called then."""
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the reward function's `extra_info`."""
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    """Experts of the first tokens of prompt and response: see `TokenOutput`."""
    seen: tuple[str, ...] = ()
    """See `TokenOutput`. If empty, the worker fills in what its servers reported."""
    multi_modal_data: Mapping[str, Any] | None = None
    """{images: every `Picture` of prompt and response, in order, videos: every `Video`}; None: those of the sample."""

    def __post_init__(self) -> None:
        lengths = {
            "response_ids": len(self.response_ids),
            "response_mask": len(self.response_mask),
        }
        for name in ("response_versions", "response_kv_versions", "response_logprobs"):
            if getattr(self, name) is not None:
                lengths[name] = len(getattr(self, name))
        if len(set(lengths.values())) > 1:
            raise ValueError(f"an agent loop returned lists of different lengths: {lengths}")
        for name, given in (self.multi_modal_data or {}).items():
            if given and not all(isinstance(each, KINDS.get(name, ())) for each in given):
                raise ValueError(
                    f"an agent loop returned multi_modal_data with {name} of {type(given[0]).__name__}; it is "
                    "{'images': pictures, 'videos': videos} of `process_vision_info`, or of keep(...) and "
                    "keep_video(...) of verl.utils.pictures"
                )
        routes, num_tokens = self.routed_experts, len(self.prompt_ids) + len(self.response_ids)
        if routes is not None and (routes.ndim != 3 or len(routes) > num_tokens):
            raise ValueError(
                f"an agent loop returned routed_experts of the shape {tuple(routes.shape)} for {num_tokens} tokens; "
                "it is [tokens, layers, experts per token]"
            )

    @property
    def numbers(self) -> dict[str, float]:
        """`metrics` as a dict."""
        found = asdict(self.metrics) if isinstance(self.metrics, AgentLoopMetrics) else dict(self.metrics)
        return {name: float(value) for name, value in found.items()}

    def with_versions(self, generated: Sequence[TokenOutput]) -> AgentLoopOutput:
        """A copy with versions from `generated`, if that begins with the policy's tokens; else with -1."""
        tokens = [token for output in generated for token in output.token_ids]
        own = [token for token, mine in zip(self.response_ids, self.response_mask, strict=True) if mine]
        recognised = tokens[: len(own)] == own

        def spread(versions: list[int]) -> list[int]:
            known = iter(versions if recognised else [NO_VERSION] * len(own))
            return [next(known) if mine else NO_VERSION for mine in self.response_mask]

        versions, oldest = self.response_versions, self.response_kv_versions
        if versions is None:
            versions = spread([version for output in generated for version in token_versions(output)])
        if oldest is None:
            oldest = spread([version for output in generated for version in token_kv_versions(output)])
        return replace(self, response_versions=versions, response_kv_versions=oldest)


class Response:
    """The response of one trajectory while it grows, up to `limit` tokens, inserted ones included."""

    def __init__(self, limit: int, *, with_log_probs: bool = True) -> None:
        """`with_log_probs`: of a response to which nothing was added."""
        self.limit = limit
        self.token_ids: list[int] = []
        self._mask: list[int] = []
        self._versions: list[int] = []
        self._kv_versions: list[int] = []
        self._log_probs: list[float] | None = [] if with_log_probs else None
        self._replicas: list[tuple[str, int, int]] = []
        self._routes: np.ndarray | None = None

    @property
    def room(self) -> int:
        """The number of tokens that may still be added."""
        return self.limit - len(self.token_ids)

    def has_generated(self, token_id: int | None) -> bool:
        """Whether the policy generated this token."""
        return any(mine and token == token_id for token, mine in zip(self.token_ids, self._mask, strict=True))

    def add_generated(self, output: TokenOutput) -> None:
        self._add_replicas(output, len(self.token_ids))
        self._routes = with_later(self._routes, output.routed_experts)
        self.token_ids += output.token_ids
        self._mask += [1] * len(output.token_ids)
        self._versions += token_versions(output)
        self._kv_versions += token_kv_versions(output)
        if output.log_probs is None:
            self._log_probs = None
        elif self._log_probs is not None:
            self._log_probs += output.log_probs

    def _add_replicas(self, output: TokenOutput, offset: int) -> None:
        for span in output.weight_versions:
            start, stop = offset + span.start, offset + span.stop
            if self._replicas and self._replicas[-1][0] == span.replica and self._replicas[-1][2] == start:
                start = self._replicas.pop()[1]
            self._replicas.append((span.replica, start, stop))

    def add_inserted(self, token_ids: Sequence[int]) -> None:
        """Add tokens that the policy reads but did not generate."""
        self.token_ids += token_ids
        self._mask += [0] * len(token_ids)
        self._versions += [NO_VERSION] * len(token_ids)
        self._kv_versions += [NO_VERSION] * len(token_ids)
        if self._log_probs is not None:
            self._log_probs += [0.0] * len(token_ids)

    def output(
        self, prompt_ids: list[int], *, num_turns: int, stop_reason: StopReason, metrics: Mapping[str, float]
    ) -> AgentLoopOutput:
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=self.token_ids,
            response_mask=self._mask,
            response_logprobs=self._log_probs,
            response_versions=self._versions,
            response_kv_versions=self._kv_versions,
            replicas=tuple(self._replicas),
            routed_experts=self._routes,
            num_turns=num_turns,
            stop_reason=stop_reason,
            metrics=metrics,
        )


def with_later(routes: np.ndarray | None, later: np.ndarray | None) -> np.ndarray | None:
    """Experts of a grown sequence: `routes` for its first tokens, `later` for the others."""
    if routes is None or later is None:
        return later if routes is None else routes
    whole: np.ndarray = np.concatenate([routes, later[len(routes) :]])
    return whole


def token_versions(output: TokenOutput) -> list[int]:
    """The weight version of each token. Raises ValueError unless the spans cover all tokens in order."""
    versions: list[int] = []
    for span in output.weight_versions:
        if span.start != len(versions):
            break
        versions += [span.version] * (span.stop - span.start)
    if len(versions) != len(output.token_ids):
        raise ValueError(f"weight versions {output.weight_versions} do not cover {len(output.token_ids)} tokens")
    return versions


def token_kv_versions(output: TokenOutput) -> list[int]:
    """The oldest version in each token's KV cache. Raises as `token_versions`."""
    spans = output.weight_versions
    oldest = (replace(span, version=span.version if span.kv_version is None else span.kv_version) for span in spans)
    return token_versions(replace(output, weight_versions=tuple(oldest)))
