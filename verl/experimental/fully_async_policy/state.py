"""What a rollouter is in the middle of: for a checkpoint, and for the one that takes its place when it dies.

A prompt is known by its place in the order in which prompts are drawn, which data and seed decide. So it takes no
journal to begin again: from the position in the data at the last sync, what was drawn since is drawn again, and what
the queue or the trainer has of it is left out. Its uid follows from its place.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.experimental.fully_async_policy.message_queue import Sample
from verl.protocol import DataProto
from verl.trainer.plain_state import from_plain, to_plain
from verl.utils.config import ConfigError


@dataclass(frozen=True)
class Prompt:
    """One prompt, `rollout.n` times under one uid."""

    index: int
    rows: DataProto


@dataclass(frozen=True)
class RollouterState:
    """Everything that a later rollouter needs to generate what this one would have."""

    dataloader: dict[str, Any]
    drawn: int
    in_flight: tuple[Prompt, ...]
    queued: tuple[Sample, ...]
    replaced: int = 0
    """Of the prompts that were drawn, those that others were drawn for."""

    @classmethod
    def at_beginning(cls, dataloader: dict[str, Any]) -> RollouterState:
        return cls(dataloader, 0, (), ())

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint, all but the position in the data."""
        return {
            "drawn": self.drawn,
            "in_flight": [to_plain((prompt.index, prompt.rows)) for prompt in self.in_flight],
            "queued": [to_plain((sample.index, sample.batch, sample.seconds, sample.greedy)) for sample in self.queued],
            "replaced": self.replaced,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], dataloader: dict[str, Any]) -> RollouterState:
        """Raises ConfigError for what `to_plain` does not make."""
        try:
            return cls(
                dataloader,
                int(plain["drawn"]),
                tuple(Prompt(*from_plain(prompt)) for prompt in plain["in_flight"]),
                tuple(Sample(*from_plain(sample)) for sample in plain["queued"]),
                int(plain.get("replaced", 0)),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise ConfigError(f"the checkpoint holds no state of a rollouter: {exc!r}") from exc


@dataclass(frozen=True)
class Anchor:
    """A rollouter when the engines got their last version, or when it began. The driver keeps it."""

    state: RollouterState
    """`in_flight` has all that it had drawn and of which it did not know that the trainer has it; of `queued`, which it
    was given itself, it knows no prompts."""
    counted: frozenset[int]
    """By its budget."""

    @classmethod
    def of(cls, state: RollouterState) -> Anchor:
        outstanding = (*(prompt.index for prompt in state.in_flight), *(sample.index for sample in state.queued))
        return cls(state, frozenset(outstanding))

    @property
    def undone(self) -> frozenset[int]:
        """Places of what was drawn before it, and may have to be generated again."""
        return Anchor.of(self.state).counted


@dataclass(frozen=True)
class Since:
    """What has become of an anchor's prompts, and of those that were drawn since."""

    there: frozenset[int] = frozenset()
    """Samples that the queue or the trainer has."""
    given_back: frozenset[int] = frozenset()
    """Of which the trainer does not make use, so that others may be started."""
    replaced: int = 0
    """How many those are since the run began."""
    is_draining: bool = False
    """Nothing is to be generated until the next sync is done."""


def uid_of(run: str, index: int) -> str:
    """Of the prompt at place `index` of `run`, which is a UUID."""
    return uuid.uuid5(uuid.UUID(run), str(index)).hex
