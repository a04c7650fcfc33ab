"""What `mismatch` needs of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from verl.mismatch.recording import Recording, Sampling


class ProbedEngine(Protocol):
    """An engine that was started from a model directory, and records what its model computes."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all ranks to a method of the extension with which it was started."""

    def compare_with_disk(self, directory: Path) -> dict[str, str]:
        """Tensor name to difference, for every tensor that is not what the engine loads from `directory`."""

    def record(
        self,
        names: Sequence[str],
        sequences: Sequence[Sequence[int]],
        prompts: Sequence[int],
        sampling: Sampling,
        *,
        new_tokens: int,
    ) -> Recording:
        """Run `sequences`, token ids of a prompt and perhaps a response each, and record at the modules `names`.

        `prompts`: how many tokens of each are its prompt. Those behind are sampled as they are, one after the other;
        without any the engine samples `new_tokens` freely.
        """

    def close(self) -> None:
        """End the engine, and remove what it left."""
