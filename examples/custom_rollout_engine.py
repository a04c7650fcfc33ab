"""A rollout engine: a bigram "language model" made of a checkpoint's embedding and output projection.

python -m verl.trainer.main_ppo actor_rollout_ref.model.external_lib=examples.custom_rollout_engine \
    actor_rollout_ref.rollout.name=bigram

It talks nonsense, but it does everything that is asked of an engine: it loads versions from the arena, pauses in all
three modes, and says which version every token came from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from verl.checkpoint_engine.errors import ActivationError
from verl.checkpoint_engine.memory.committed import read_committed
from verl.utils.config import ConfigError
from verl.workers.rollout import RolloutReplica, RolloutReplicaRegistry
from verl.workers.rollout.engine import EngineSpec, eos_token_ids
from verl.workers.rollout.hf.sampling import sample
from verl.workers.rollout.records import NO_VERSION, SamplingOptions, StopReason, TokenOutput, WeightVersionSpan

EMBEDDING, PROJECTION = "model.embed_tokens.weight", "lm_head.weight"


@RolloutReplicaRegistry.register("bigram")
class BigramReplica(RolloutReplica):
    """The driver's side."""

    engine = "examples.custom_rollout_engine:BigramEngine"

    def check_config(self) -> None:
        if self.config.tensor_model_parallel_size != 1:
            raise ConfigError("rollout.name=bigram runs on one rank: set rollout.tensor_model_parallel_size=1")
        if self.config.load_format != "dummy":
            raise ConfigError("rollout.name=bigram takes its weights from the trainer: set rollout.load_format=dummy")

    def env_vars(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1"}


@dataclass(eq=False)
class Request:
    context: int
    max_tokens: int
    stop: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    aborted: bool = False

    def stop_reason(self) -> StopReason | None:
        if self.tokens and self.tokens[-1] in self.stop:
            return "completed"
        if len(self.tokens) >= self.max_tokens:
            return "length"
        return "aborted" if self.aborted else None


class BigramEngine:
    """See `verl.workers.rollout.engine.Engine`. All of it runs on the server's engine loop; a step takes no time."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._version = NO_VERSION
        self._pause_mode: str | None = None
        self._requests: set[Request] = set()

    async def start(self) -> None:
        self._changed = asyncio.Condition()
        self._eos = frozenset(eos_token_ids(self._spec.model))
        self._generator = torch.Generator().manual_seed(self._spec.seed)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOptions, request_id: str) -> TokenOutput:
        request = Request(
            context=prompt_ids[-1],
            max_tokens=min(sampling.max_tokens, self._spec.max_model_len - len(prompt_ids)),
            stop=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos),
        )
        self._requests.add(request)
        try:
            while (reason := request.stop_reason()) is None:
                async with self._changed:
                    await self._changed.wait_for(lambda: request.aborted or self._may_step(request))
                    if not request.aborted:
                        self._step(request, sampling)
                await asyncio.sleep(0)  # the other requests' turn
        finally:
            self._requests.discard(request)
            async with self._changed:
                self._changed.notify_all()
        return TokenOutput(
            request.tokens, request.log_probs if sampling.logprobs else None, reason, _spans(request.versions)
        )

    async def pause(self, mode: str) -> None:
        async with self._changed:
            self._pause_mode = mode
            if mode == "abort":
                for request in self._requests:
                    request.aborted = True
            self._changed.notify_all()
            if mode == "wait":
                await self._changed.wait_for(lambda: not any(request.tokens for request in self._requests))

    async def resume(self) -> None:
        async with self._changed:
            self._pause_mode = None
            self._changed.notify_all()

    async def activate(self, arena_path: str, version: int) -> None:
        """Copy what is needed: the arena's tensors are borrowed until the iterator ends."""
        wanted = {
            name: tensor.to(torch.float32, copy=True)
            for name, tensor in read_committed(arena_path, version)
            if name in (EMBEDDING, PROJECTION)
        }
        if EMBEDDING not in wanted:
            raise ActivationError(f"the version has no tensor {EMBEDDING}", version=version, phase="activate")
        self._embedding = wanted[EMBEDDING]
        self._projection = wanted.get(PROJECTION, self._embedding)  # tied: sent once, under the embedding's name
        self._version = version

    async def clear_cache(self) -> None:
        """There is no cache."""

    async def sleep(self, *, weights: bool) -> None:
        """Never called: `can_sleep_on` of the replica is empty."""

    async def wake(self, *, weights: bool) -> None:
        """Never called."""

    async def health(self) -> None:
        """No other process can have died."""

    async def shutdown(self) -> None:
        """No other process has to be ended."""

    def _may_step(self, request: Request) -> bool:
        return self._pause_mode is None or (self._pause_mode == "wait" and bool(request.tokens))

    def _step(self, request: Request, sampling: SamplingOptions) -> None:
        context = request.tokens[-1] if request.tokens else request.context
        logits = (self._projection @ self._embedding[context]).unsqueeze(0)
        (token,), (log_prob,) = sample(logits, [sampling], [self._generator])
        request.tokens.append(token)
        request.log_probs.append(log_prob)
        request.versions.append(self._version)


def _spans(versions: Sequence[int]) -> tuple[WeightVersionSpan, ...]:
    starts = [index for index in range(len(versions)) if index == 0 or versions[index] != versions[index - 1]]
    stops = [*starts[1:], len(versions)][: len(starts)]
    return tuple(WeightVersionSpan(start, stop, versions[start]) for start, stop in zip(starts, stops, strict=True))
