"""What an attempt at a sample leaves for the next one on the same worker, when its batch has failed.

A loop that is run again makes its calls again. One that is equal to a call of the attempt before has that one's answer,
or goes on with it, on whatever engines there are now. With seeds nothing is left: the same answers come again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import xxhash

from verl.experimental.agent_loop.output import AgentLoopOutput
from verl.experimental.agent_loop.unfinished import Partial
from verl.utils.pictures import Medium
from verl.workers.rollout.records import CallName, SamplingOptions, TokenOutput

MOST = 4096
"""Samples of which something is left."""


@dataclass(slots=True)
class Call:
    """One request for an answer of the policy."""

    asked: Hashable
    so_far: Partial
    output: TokenOutput | None = None
    """Once it is complete."""

    @property
    def num_tokens(self) -> int:
        return len(self.so_far.token_ids if self.output is None else self.output.token_ids)

    @property
    def num_known(self) -> int:
        """With those that are told of the piece under way."""
        told = self.so_far.told
        return self.num_tokens + (told.num_tokens if told is not None and self.output is None else 0)


def asked(prompt_ids: Sequence[int], sampling: SamplingOptions, pictures: Sequence[Medium] | None) -> str:
    """Equal for equal requests, in other processes, too. Of a long conversation it is small."""
    digest = xxhash.xxh3_128(array("q", prompt_ids).tobytes())
    digest.update(repr((sampling, tuple(pictures or ()))).encode())
    return digest.hexdigest()


@dataclass(slots=True)
class Attempt:
    """The calls of a loop, which may begin with some of an attempt before."""

    before: list[Call] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @property
    def all_calls(self) -> list[Call]:
        return [*self.before, *self.calls]

    def begin(self, request: Hashable, max_tokens: int) -> Call:
        """The call of the attempt before, once, or a new one."""
        found = next((call for call in self.before if call.asked == request), None)
        if found is None:
            found = Call(request, Partial(max_tokens))
        else:
            self.before.remove(found)
        self.calls.append(found)
        return found


def calls_of(kept: Iterable[tuple[CallName, TokenOutput]]) -> dict[Hashable, list[Call]]:
    """By sample, from what servers have of a worker that died. An answer may be in several pieces, on several servers:
    what follows a piece that is missing is left out."""
    calls: dict[tuple[Hashable, Hashable], Call] = {}
    for name, output in sorted(kept, key=lambda one: one[0].start):
        call = calls.setdefault((name.sample, name.asked), Call(name.asked, Partial(name.max_tokens)))
        if call.output is not None or name.start != len(call.so_far.token_ids):
            continue
        call.so_far.add(output)
        if output.stop_reason in ("completed", "length"):
            call.output = call.so_far.output(output.stop_reason)
    found: dict[Hashable, list[Call]] = {}
    for (sample, _), call in calls.items():
        if call.num_tokens:
            found.setdefault(sample, []).append(call)
    return found


class Attempts:
    """Of the samples whose batches have failed."""

    def __init__(self) -> None:
        self._left: OrderedDict[Hashable, AgentLoopOutput | list[Call]] = OrderedDict()

    def leave(self, sample: Hashable, left: AgentLoopOutput | list[Call]) -> None:
        """`left`: what its loop returned, or its calls."""
        self._left[sample] = left
        while len(self._left) > MOST:
            self._left.popitem(last=False)

    def calls(self) -> Iterable[tuple[Hashable, Call]]:
        """Of samples that are not complete."""
        return [(sample, call) for sample, left in self._left.items() if isinstance(left, list) for call in left]

    def take(self, sample: Hashable) -> AgentLoopOutput | list[Call]:
        return self._left.pop(sample, [])
