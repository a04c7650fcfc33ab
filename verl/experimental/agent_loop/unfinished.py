"""Responses that are not finished: in several pieces, and as far as they are known before their server dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from ray.exceptions import RayError

from verl.experimental.agent_loop.output import with_later
from verl.utils.seeds import derived
from verl.workers.rollout.errors import RolloutError
from verl.workers.rollout.records import StopReason, TokenOutput, WeightVersionSpan
from verl.workers.rollout.written_calls import CallDirectory, ReadCall

logger = logging.getLogger(__name__)

TOLD_EVERY_S = 0.05
"""Between two requests for what a server on another host has sampled, of all responses: so much is lost with it."""
TOLD_AT_LEAST_EVERY_S = 0.2
SHARE = 20
"""Between those two, the pause is so many times as long as the last request took: a server has other work."""


class Partial:
    """A response that may come in several pieces."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.told: Told | None = None
        """The piece that is under way."""
        self.ended: StopReason | None = None
        """Set by its last piece: no token follows."""
        self.token_ids: list[int] = []
        self._log_probs: list[float] | None = []
        self._spans: list[WeightVersionSpan] = []
        self._routes: np.ndarray | None = None
        self._seen: tuple[str, ...] = ()

    @property
    def room(self) -> int:
        return self.max_tokens - len(self.token_ids)

    def seed(self, given: int | None) -> int | None:
        """Of the next piece. With the same one its tokens would be drawn with the numbers that the first tokens were
        drawn with, and those are no longer independent of the prompt."""
        return derived(given, len(self.token_ids)) if given is not None and self.token_ids else given

    def add(self, piece: TokenOutput) -> None:
        if self._seen and piece.seen != self._seen:
            raise RolloutError("two engines made different patches of the pictures of one prompt")
        self._seen = piece.seen
        if piece.stop_reason in ("completed", "length"):
            self.ended = piece.stop_reason
        offset = len(self.token_ids)
        for span in piece.weight_versions:
            start, stop = span.start + offset, span.stop + offset
            last = self._spans[-1] if self._spans else None
            span = replace(span, start=start, stop=stop)
            same = last and (last.stop, last.version, last.kv_version, last.replica)
            if same == (span.start, span.version, span.kv_version, span.replica):
                span = replace(span, start=self._spans.pop().start)
            self._spans.append(span)
        self.token_ids += piece.token_ids
        self._routes = with_later(self._routes, piece.routed_experts)
        if piece.log_probs is None:
            self._log_probs = self._log_probs if not piece.token_ids else None
        elif self._log_probs is not None:
            self._log_probs += piece.log_probs

    def known(self) -> TokenOutput:
        """All of it, as one that `died` if more is to follow, with what is told of the piece under way."""
        piece = self.told.output() if self.told is not None else None
        if piece is None:
            return self.output(self.ended or "died")
        whole = Partial(self.max_tokens)
        for part in (self.output("died"), piece):
            whole.add(part)
        return whole.output(whole.ended or "died")

    def output(self, stop_reason: StopReason) -> TokenOutput:
        return TokenOutput(
            self.token_ids, self._log_probs, stop_reason, tuple(self._spans), self._routes, seen=self._seen
        )


class Told:
    """One unfinished response, as far as its server has told, or has written to this host's memory."""

    def __init__(self, written: ReadCall | None = None) -> None:
        self._written = written
        self._parts: list[TokenOutput] = []
        self._num_tokens = 0

    @property
    def written_to(self) -> Path | None:
        return None if self._written is None else self._written.path

    @property
    def is_written(self) -> bool:
        return self._written is not None and self._written.is_written

    @property
    def num_tokens(self) -> int:
        self._read()
        return self._num_tokens

    def add(self, part: TokenOutput) -> None:
        """The tokens that follow: see `TellingEngine`."""
        self._parts.append(part)
        self._num_tokens += len(part.token_ids)

    def _read(self) -> None:
        for part in self._written.new_parts() if self._written is not None else ():
            self.add(part)

    def output(self) -> TokenOutput | None:
        """All of it, as one that `died` if its server has not finished it; None without a token."""
        self._read()
        if not self._num_tokens:
            return None
        whole = Partial(self._num_tokens)
        for part in self._parts:
            whole.add(replace(part, routed_experts=None))
        first, last = self._parts[0], self._parts[-1]
        routes = [part.routed_experts for part in self._parts if part.routed_experts is not None]
        return replace(
            whole.output(last.stop_reason),
            routed_experts=np.concatenate(routes) if routes else None,
            cache=last.cache,
            cached_tokens=first.cached_tokens,
            reusable=last.reusable,
            computed_again=sum(part.computed_again for part in self._parts),
        )


class Listener:
    """What one server has sampled of the calls under way. On the loop of its caller.

    A server on this host writes it into `directory`. Another one is asked, in one request for all calls: what that
    costs does not grow with the number of tokens a second and call.
    """

    def __init__(self, server: Any, every_s: float = TOLD_EVERY_S, directory: CallDirectory | None = None) -> None:
        """`server` is an actor with `tokens_since`: see `RolloutServer`."""
        self._server, self._every_s, self._directory = server, every_s, directory
        self._calls: dict[str, Told] = {}
        self._asking: asyncio.Task[None] | None = None
        self._tells = True

    @contextmanager
    def listening(self, call_id: str) -> Iterator[Told]:
        """What is told of that call within the block."""
        with ExitStack() as stack:
            told = self._calls[call_id] = Told(self._file(stack))
            stack.callback(self._calls.pop, call_id)
            if self._tells and (self._asking is None or self._asking.done()):
                self._asking = asyncio.create_task(self._ask())
            yield told

    def _file(self, stack: ExitStack) -> ReadCall | None:
        if self._directory is None or not self._tells:
            return None
        try:
            return stack.enter_context(self._directory.reading())
        except OSError as exc:
            logger.warning("a server is asked for its tokens, as shared memory cannot be used: %s", exc)
            self._directory = None
            return None

    async def _ask(self) -> None:
        pause_s = self._every_s
        while self._tells:
            await asyncio.sleep(pause_s)
            known = {call_id: told.num_tokens for call_id, told in self._calls.items() if not told.is_written}
            if not known:
                return
            began_s = time.monotonic()
            try:
                parts = await self._server.tokens_since.remote(known)
            except RayError:  # as the calls themselves will say
                continue
            pause_s = max(min(SHARE * (time.monotonic() - began_s), TOLD_AT_LEAST_EVERY_S), self._every_s)
            self._tells = parts is not None
            for call_id, part in (parts or {}).items():
                told = self._calls.get(call_id)
                if told is not None and not told.is_written:  # else it has been answered since, or has a file
                    told.add(part)
