"""A rollouter's state: for a checkpoint, and for its replacement when it dies.

A prompt is identified by its index in the order of drawing, which data and seed determine; its uid follows from that.
So a replacement needs no journal: from the position in the data at the last sync it draws the same prompts again, and
omits those that the queue or the trainer has.
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
    """All that a later rollouter needs to generate what this one would have generated."""

    dataloader: dict[str, Any]
    drawn: int
    in_flight: tuple[Prompt, ...]
    queued: tuple[Sample, ...]
    replaced: int = 0
    """The number of drawn prompts that others have replaced."""

    @classmethod
    def at_beginning(cls, dataloader: dict[str, Any]) -> RollouterState:
        return cls(dataloader, 0, (), ())

    def to_plain(self) -> dict[str, Any]:
        """Plain values for a checkpoint, without the position in the data."""
        return {
            "drawn": self.drawn,
            "in_flight": [to_plain((prompt.index, prompt.rows)) for prompt in self.in_flight],
            "queued": [to_plain(sample.content) for sample in self.queued],
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
    """The rollouter's state when the engines got their last version, or at its start. The driver keeps it."""

    state: RollouterState
    """`in_flight` has all prompts drawn and not confirmed by the trainer; not those of `queued`, which the rollouter
    got as samples."""
    counted: frozenset[int]
    """The prompts that its budget counts."""

    @classmethod
    def of(cls, state: RollouterState) -> Anchor:
        outstanding = (*(prompt.index for prompt in state.in_flight), *(sample.index for sample in state.queued))
        return cls(state, frozenset(outstanding))

    @property
    def undone(self) -> frozenset[int]:
        """Indices of prompts drawn before the anchor that may have to be generated again."""
        return Anchor.of(self.state).counted


@dataclass(frozen=True)
class Since:
    """The fate of an anchor's prompts, and of those drawn since."""

    there: frozenset[int] = frozenset()
    """Indices of samples that the queue or the trainer has."""
    given_back: frozenset[int] = frozenset()
    """Indices of samples that the trainer took but does not train on, so that others may be started."""
    replaced: int = 0
    """The number of such samples since the start of the run."""
    is_draining: bool = False
    """Whether no prompt may start until the next sync has ended."""


def uid_of(run: str, index: int) -> str:
    """The uid of the prompt at `index` in `run`, a UUID."""
    return uuid.uuid5(uuid.UUID(run), str(index)).hex
