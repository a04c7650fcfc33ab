"""Answers that a server keeps for an agent-loop worker, in case that dies: another one then goes on with them.

A worker and its servers keep for each other what both have anyway. State of the engine loop.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from verl.workers.rollout.records import CallName, TokenOutput

MOST_TOKENS = 16 * 2**20
"""Of the answers that are kept, of all workers: 12 bytes each. The oldest ones go."""


@dataclass(slots=True)
class _Kept:
    """A tenth of what lists of the same numbers take."""

    output: TokenOutput
    token_ids: array[int]
    log_probs: array[float] | None

    @classmethod
    def of(cls, output: TokenOutput) -> _Kept:
        log_probs = None if output.log_probs is None else array("d", output.log_probs)
        return cls(replace(output, token_ids=[], log_probs=None), array("i", output.token_ids), log_probs)

    def whole(self) -> TokenOutput:
        log_probs = None if self.log_probs is None else self.log_probs.tolist()
        return replace(self.output, token_ids=self.token_ids.tolist(), log_probs=log_probs)


class KeptCalls:
    """The calls with a name: those under way, and those whose sample is not known to be complete."""

    def __init__(self) -> None:
        self._under_way: dict[str, tuple[CallName, asyncio.Task[object] | None]] = {}
        self._answered: OrderedDict[CallName, _Kept] = OrderedDict()
        self._tokens = 0

    @contextmanager
    def during(self, request_id: str, name: CallName) -> Iterator[Callable[[TokenOutput], None]]:
        """Around a call. What this yields is called with its answer."""

        def keep(output: TokenOutput) -> None:
            if name in self._answered:
                self._pop(name)
            self._answered[name] = _Kept.of(output)
            self._tokens += len(output.token_ids)
            while self._tokens > MOST_TOKENS:
                self._pop(next(iter(self._answered)))

        self._under_way[request_id] = name, asyncio.current_task()
        try:
            yield keep
        finally:
            self._under_way.pop(request_id, None)

    def forget(self, owner: str, samples: Collection[Hashable]) -> None:
        """These are complete."""
        complete = frozenset(samples)
        for name in [name for name in self._answered if name.owner == owner and name.sample in complete]:
            self._pop(name)

    def take(self, owner: str, so_far: Callable[[str], TokenOutput | None]) -> list[tuple[CallName, TokenOutput]]:
        """All of a worker that died. Ends the calls that are under way, of which `so_far` says what they have."""
        taken = [(name, self._pop(name).whole()) for name in list(self._answered) if name.owner == owner]
        for request_id, (name, task) in list(self._under_way.items()):
            if name.owner != owner:
                continue
            if (output := so_far(request_id)) is not None:
                taken.append((name, output))
            if task is not None:
                task.cancel()
        return taken

    def _pop(self, name: CallName) -> _Kept:
        kept = self._answered.pop(name)
        self._tokens -= len(kept.token_ids)
        return kept
