"""Plain transformers behind the `Engine` port: one batch at a time, one token per step.

The batch's KV cache is computed anew whenever requests join; that is simple, and enough for tests and for seeing what
an engine has to do.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from verl.checkpoint_engine.memory.committed import open_to_activate
from verl.utils.config import ConfigError
from verl.utils.language_model import auto_class, choose_part, is_wrapper, language_config, sees
from verl.utils.model import ATTENTION, override, read_hf_config
from verl.utils.pictures import Medium, PictureError, load_processor
from verl.workers.hf.attention import attention_implementation
from verl.workers.hf.checkpoint import HFCheckpoint
from verl.workers.hf.probing import Build
from verl.workers.hf.seeing import Sight
from verl.workers.hf.wrapped import conversion_between
from verl.workers.rollout.engine import EngineSpec, eos_token_ids
from verl.workers.rollout.errors import NotFinite, ReplicaDied, RolloutError
from verl.workers.rollout.hf.batch import DecodeBatch, Decoding
from verl.workers.rollout.hf.decoding import find_decoding
from verl.workers.rollout.hf.routes import RouteWatch
from verl.workers.rollout.hf.sampling import sample
from verl.workers.rollout.hf.weights import load_weights
from verl.workers.rollout.records import NO_VERSION, SamplingOptions, StopReason, TokenOutput, WeightVersionSpan

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(eq=False)
class Request:
    """One response that is being generated."""

    prompt: list[int]
    sampling: SamplingOptions
    stop: frozenset[int]
    generator: torch.Generator
    output: asyncio.Future[TokenOutput]
    max_tokens: int
    pictures: Sequence[Medium] = ()
    seen: tuple[str, ...] = ()
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(index of the first token, version) of each span."""
    routes: list[np.ndarray] = field(default_factory=list)
    """The experts of its tokens, from the first on, if they are recorded."""

    def add(self, token: int, log_prob: float, version: int) -> None:
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.tokens), version))
        self.tokens.append(token)
        self.log_probs.append(log_prob)

    @property
    def ended(self) -> StopReason | None:
        if self.tokens and self.tokens[-1] in self.stop:
            return "completed"
        return "length" if len(self.tokens) >= self.max_tokens else None

    def finish(self, reason: StopReason) -> None:
        if not self.output.done():  # else its caller has given up
            self.output.set_result(self.after(0, reason))

    def after(self, known: int, reason: StopReason) -> TokenOutput:
        """Without the first `known` tokens, and their experts."""
        stops = [start for start, _ in self.versions[1:]] + [len(self.tokens)]
        spans = tuple(
            WeightVersionSpan(max(start - known, 0), stop - known, version)
            for (start, version), stop in zip(self.versions, stops, strict=bool(self.versions))
            if stop > known
        )
        log_probs = self.log_probs[known:] if self.sampling.logprobs else None
        routes = np.concatenate(self.routes) if self.routes else None
        if routes is not None and reason == "died":  # a step may be under way, and have told of the next token already
            read = len(self.prompt) + len(self.tokens) - 1
            routes = routes[len(self.prompt) + known - 1 if known else 0 : read]
        return TokenOutput(self.tokens[known:], log_probs, reason, spans, routes, seen=self.seen)

    def add_routes(self, read: np.ndarray) -> None:
        """Add the routes of a step's tokens: one new token, or all tokens again, which keep their first routes."""
        known = sum(map(len, self.routes))
        self.routes.append(read if len(read) == 1 else read[known:])


class HFEngine:
    """See `verl.workers.rollout.engine.Engine`. State lives on the engine loop; the model is used in one thread."""

    sees: Literal[True] = True
    tells: Literal[True] = True

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._requests: dict[str, Request] = {}
        """By id, those without an answer."""
        self._model_thread = ThreadPoolExecutor(1, thread_name_prefix=f"{spec.name}-model")
        self._version = NO_VERSION
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        self._pause_mode: str | None = None
        self._stepping = False

    async def start(self) -> None:
        self._changed = asyncio.Condition()
        self._eos = frozenset(eos_token_ids(self._spec.model))
        self._generator = torch.Generator(self._spec.device).manual_seed(self._spec.seed)
        self._model = await self._in_model_thread(self._build)
        watch = RouteWatch(self._model) if self._spec.config.enable_rollout_routing_replay else None
        self._batch = DecodeBatch(self._model, watch, self._way)
        self._decoding = asyncio.create_task(self._decode())

    def _build(self) -> PreTrainedModel:
        """With the attention of the trainer. Raises ConfigError for a model that does not compute what it defines."""
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model, trust = self._spec.model, self._spec.model.trust_remote_code
        dtype = getattr(torch, self._spec.config.dtype)
        self._whole = read_hf_config(model.path, trust_remote_code=trust)
        override(self._whole, model.override_config, "model.override_config")
        choose_part(self._whole, model.language_model_only, "model.language_model_only")
        config = language_config(self._whole)
        factory: Any = auto_class(config)
        self._processor = load_processor(model.path, self._whole)
        implementation = attention_implementation(config, model.override_config.get(ATTENTION))

        def from_config(config: PretrainedConfig, implementation: str | None, dtype: torch.dtype) -> PreTrainedModel:
            asked = {ATTENTION: implementation} if implementation else {}
            built: PreTrainedModel = factory.from_config(
                copy.deepcopy(config), dtype=dtype, trust_remote_code=trust, **asked
            )
            return built

        self._way = self._find_way(config, partial(from_config, dtype=torch.float32), implementation)
        if self._spec.config.load_format == "auto" and is_wrapper(self._whole):
            built: Any = from_config(config, implementation, dtype)
            with HFCheckpoint(Path(model.path)) as checkpoint:
                aside = conversion_between(built, self._whole, checkpoint.shapes).aside
                names = checkpoint.names.difference(aside)
                load_weights(built, self._whole, {name: checkpoint.read(name) for name in names})
        elif self._spec.config.load_format == "auto":
            asked = {ATTENTION: implementation} if implementation else {}
            built = factory.from_pretrained(model.path, config=config, dtype=dtype, trust_remote_code=trust, **asked)
        else:
            built = from_config(config, implementation, dtype)
        whole: PreTrainedModel = built.to(self._spec.device).eval()
        return whole

    def _find_way(self, config: PretrainedConfig, build: Build, implementation: str | None) -> Decoding:
        """How the model is decoded. Says what it is, where it is not with a cache."""
        model = self._spec.model
        path, found = model.path, find_decoding(config, build, implementation, lasts=model.is_of_transformers)
        if found.decoding is None:
            raise ConfigError(f"model.path={path}: {found.why}")
        if sees(config) and found.decoding is not Decoding.CACHED:
            raise ConfigError(f"model.path={path} sees, and is only decoded with a cache: {found.why}")
        if found.why:
            how = "one after the other" if found.decoding is Decoding.ALONE else "in rows"
            logger.warning("%s is decoded without a cache, %s: %s", path, how, found.why)
        if found.changes_later:
            logger.warning(
                "%s says something else of a token once others follow it: log-probs of the trainer, which sees whole "
                "sequences, are others than those of its rollouts",
                path,
            )
        return found.decoding

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingOptions, request_id: str, pictures: Sequence[Medium] = ()
    ) -> TokenOutput:
        seen: tuple[str, ...] = ()
        if pictures:
            seen = await self._in_model_thread(lambda: self._require_seen(prompt_ids, pictures, request_id))
        generator = self._generator
        if sampling.seed is not None:
            generator = torch.Generator(self._spec.device).manual_seed(sampling.seed)
        request = Request(
            prompt=list(prompt_ids),
            sampling=sampling,
            stop=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos),
            generator=generator,
            output=asyncio.get_running_loop().create_future(),
            max_tokens=min(sampling.max_tokens, self._spec.max_model_len - len(prompt_ids)),
            pictures=pictures,
            seen=seen,
        )
        async with self._changed:
            self._waiting.append(request)
            self._changed.notify_all()
        self._requests[request_id] = request
        try:
            return await request.output
        finally:
            del self._requests[request_id]

    def so_far(self, request_id: str, known: int) -> TokenOutput | None:
        """See `TellingEngine`. None with a seed, which draws the whole response again elsewhere."""
        request = self._requests.get(request_id)
        if request is None or request.sampling.seed is not None or len(request.tokens) <= known:
            return None
        if request.output.done():  # after its last token no other one is to follow
            return None
        return request.after(known, "died")

    def _require_seen(self, prompt_ids: Sequence[int], pictures: Sequence[Medium], request_id: str) -> tuple[str, ...]:
        """Check the pictures of one request before it joins others; returns their digests. Raises RolloutError."""
        what = f"{self._spec.name}: request {request_id}"
        if self._processor is None:
            raise RolloutError(f"{what} has pictures, and the model reads text alone")
        try:
            Sight(processor=self._processor, pictures=[pictures]).require(prompt_ids)
            return self._processor.digests(pictures)
        except (PictureError, ValueError) as exc:
            raise RolloutError(f"{what}: {exc}") from exc

    async def pause(self, mode: str) -> None:
        async with self._changed:
            self._pause_mode = mode
            await self._changed.wait_for(lambda: not self._stepping and (mode != "wait" or not self._active))
            if mode == "abort":
                for request in (*self._active, *self._waiting):
                    request.finish("aborted")
                self._active.clear()
                self._waiting.clear()

    async def resume(self) -> None:
        async with self._changed:
            self._pause_mode = None
            self._changed.notify_all()

    async def activate(self, arena_path: str, version: int) -> None:
        await self._in_model_thread(lambda: self._load(arena_path, version))
        self._version = version
        self._batch.forget()

    def _load(self, arena_path: str, version: int) -> None:
        with open_to_activate(arena_path, version) as (_, view):
            load_weights(self._model, self._whole, dict(view.tensors()))

    async def clear_cache(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._stepping)
            self._batch.forget()

    async def sleep(self, *, weights: bool) -> None:
        raise RolloutError(f"{self._spec.name}: the hf engine cannot sleep")

    async def wake(self, *, weights: bool) -> None:
        raise RolloutError(f"{self._spec.name}: the hf engine cannot sleep")

    async def health(self) -> None:
        if self._decoding.done():
            error = None if self._decoding.cancelled() else self._decoding.exception()
            raise ReplicaDied(f"{self._spec.name}: decoding has ended") from error

    async def shutdown(self) -> None:
        self._decoding.cancel()
        self._model_thread.shutdown(wait=False, cancel_futures=True)

    async def _decode(self) -> None:
        """Step as long as there is something to decode. A failure ends the engine, and every request with it."""
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(self._can_step)
                    self._admit()
                    self._stepping = bool(self._active)
                if self._stepping:
                    await self._decode_once()
        except Exception as exc:
            for request in (*self._active, *self._waiting):
                if not request.output.done():
                    request.output.set_exception(ReplicaDied(f"{self._spec.name}: decoding failed: {exc!r}"))
            raise

    async def _decode_once(self) -> None:
        """Of weights that cannot be sampled from the requests fail; the engine waits for better ones."""
        try:
            found, refusal = await self._in_model_thread(self._step), None
        except NotFinite as exc:
            found, refusal = None, exc
        async with self._changed:
            self._stepping = False
            if found is not None:
                self._record(*found)
            else:
                self._refuse(
                    f"{self._spec.name}: {refusal} with the weights of version {self._version}: the policy has "
                    "diverged. Resume from an earlier checkpoint (trainer.resume_mode=resume_path) with a lower "
                    "learning rate"
                )
            self._changed.notify_all()

    def _refuse(self, why: str) -> None:
        for request in self._active:
            if not request.output.done():
                request.output.set_exception(NotFinite(why))
        self._active.clear()

    def _can_step(self) -> bool:
        if self._pause_mode is None:
            return bool(self._active or self._waiting)
        return self._pause_mode == "wait" and bool(self._active)

    def _admit(self) -> None:
        """Let waiting requests join a batch that is at most half full; it is computed anew, so they join in groups."""
        room = self._spec.config.max_num_seqs
        if not self._waiting or self._pause_mode is not None or 2 * len(self._active) > room:
            return
        while self._waiting and len(self._active) < room:
            request = self._waiting.popleft()
            if not request.output.done():  # its caller may have given up
                self._active.append(request)
        self._batch.forget()

    def _step(self) -> tuple[list[int], list[float]]:
        sight = None
        if self._processor is not None and any(request.pictures for request in self._active):
            sight = Sight(processor=self._processor, pictures=[request.pictures for request in self._active])
        logits = self._batch.next_logits([request.prompt + request.tokens for request in self._active], sight)
        for request, read in zip(self._active, self._batch.routes, strict=bool(self._batch.routes)):
            request.add_routes(read)
        return sample(
            logits, [request.sampling for request in self._active], [request.generator for request in self._active]
        )

    def _record(self, tokens: list[int], log_probs: list[float]) -> None:
        for request, token, log_prob in zip(self._active, tokens, log_probs, strict=True):
            request.add(token, log_prob, self._version)
            if reason := request.ended:
                request.finish(reason)
        going_on = [row for row, request in enumerate(self._active) if not request.output.done()]
        if len(going_on) < len(self._active):
            self._active = [self._active[row] for row in going_on]
            if going_on:
                self._batch.keep(going_on)

    async def _in_model_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._model_thread, work)
