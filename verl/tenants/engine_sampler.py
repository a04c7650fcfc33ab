"""Sampling with an engine of its own, beside the thread that trains. An engine that dies is started again."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from verl.tenants.base import Shape
from verl.tenants.checkpoints import Version
from verl.tenants.engine import Drawing, Drawn, Engine, EngineDied, Slots
from verl.tenants.sampler import Asked, InProcessSampler, joined
from verl.tenants.wire import Likeliest, Sampled, written_samples

BEGINNINGS = 2
"""A request that was under way when the engine died is begun again once: it may be what ended the engine."""

logger = logging.getLogger(__name__)


class EngineSampler:
    """A `Sampler`. Prompts are scored by the one in this process: on the processor, vLLM 0.32 takes the places of a
    prompt for requests where it adds an adapter's part to their logits. It dies, or silently adds other adapters'."""

    def __init__(self, start: Callable[[], Engine], scorer: InProcessSampler, tokenizer: Any, vocabulary: int) -> None:
        """`start` blocks until its engine can compute; it is called in a thread."""
        self._start, self._scorer = start, scorer
        self._decode: Callable[[list[int]], str] = tokenizer.decode
        self._vocabulary = vocabulary
        self._engine: Engine | None = None
        self._require: Callable[[Shape], None] | None = None
        """The first engine's: they are all alike."""
        self._starting = asyncio.Lock()
        self._preparing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Called first. Raises what `start` of the engine raises."""
        self._require = (await self._running()).require

    def require(self, shape: Shape) -> None:
        assert self._require is not None
        self._require(shape)

    def prepare(self, version: Version) -> None:
        """Have a living engine load it, unless all its places are used."""
        if self._engine is not None:
            task = asyncio.ensure_future(self._prepare(self._slots, version))
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)

    async def _prepare(self, slots: Slots, version: Version) -> None:
        try:
            await slots.prepare(version)
        except Exception as exc:  # noqa: BLE001 - a sample of it is told
            logger.info("%s was not loaded as it was saved: %s", version.path, exc)

    async def sample(self, version: Version | None, asked: Asked) -> bytes:
        """Raises EngineDied if the request is under way at two deaths, or no engine can be started again."""
        samples, scored = await asyncio.gather(self._samples(version, asked), self._scorer.score(version, asked))
        return written_samples(samples, *scored)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    async def _samples(self, version: Version | None, asked: Asked) -> list[Sampled]:
        number = asked.number if asked.temperature > 0 else 1
        for left in reversed(range(BEGINNINGS)):
            engine = await self._running()
            try:
                async with self._slots.holding(version) as digest:
                    drawn = await asyncio.gather(
                        *(self._draw(engine, digest, asked, index) for index in range(number)), return_exceptions=True
                    )
                failed = [each for each in drawn if isinstance(each, BaseException)]
                for failure in sorted(failed, key=lambda each: not isinstance(each, EngineDied)):
                    raise failure
                samples = [each for each in drawn if isinstance(each, Sampled)]
                return samples if asked.temperature > 0 else samples * asked.number
            except EngineDied as exc:
                await self._bury(engine, exc)
                if not left:
                    raise EngineDied(f"{exc}; the request was under way at {BEGINNINGS} deaths, send it again") from exc
        raise AssertionError("unreachable")

    async def _draw(self, engine: Engine, digest: str | None, asked: Asked, index: int) -> Sampled:
        drawing = Drawing(
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            seed=None if asked.seed is None else _seed(asked.seed, index),
            stop_tokens=asked.stop_tokens,
            likeliest=min(asked.likeliest_of_samples, self._vocabulary),
            stream=bool(asked.stop_strings),
        )
        tokens: list[int] = []
        places: list[Drawn] = []
        stopped = False
        async with aclosing(engine.draw(asked.prompt.tolist(), drawing, digest)) as parts:
            async for part in parts:
                for place in part:
                    places.append(place)
                    tokens.append(place.token)
                    stopped = asked.ended_by(tokens, self._decode)
                    if stopped:
                        break
                if stopped:
                    break
        return Sampled(
            tokens=np.array(tokens, dtype=np.int32),
            logprobs=np.array([place.logprob for place in places], dtype=np.float32),
            stopped=stopped,
            likeliest=joined([_likeliest(place.likeliest) for place in places]) if drawing.likeliest else None,
        )

    async def _running(self) -> Engine:
        async with self._starting:
            if self._engine is None:
                self._engine = await asyncio.to_thread(self._start)
                self._slots = Slots(self._engine)
                await self._engine.check()
                logger.info("the engine samples")
            return self._engine

    async def _bury(self, engine: Engine, exc: EngineDied) -> None:
        async with self._starting:
            if self._engine is engine:
                self._engine = None
                logger.warning("%s; it is started again, and requests under way are begun again", exc)
                await asyncio.to_thread(engine.close)


def _seed(seed: int, index: int) -> int:
    """Of one of several samples: other than those of neighbouring seeds."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _likeliest(places: Sequence[tuple[int, float]]) -> Likeliest:
    """Of one token, [1, k]."""
    tokens, logprobs = zip(*places, strict=True)
    return Likeliest(tokens=np.array([tokens], dtype=np.int32), logprobs=np.array([logprobs], dtype=np.float32))
