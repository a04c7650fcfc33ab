"""The protocol between trainer and generation, and generation that survives the death of its workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from verl.protocol import DataProto
from verl.trainer.fleet.recovery import AGENT_LOOPS, BATCH, Recovery
from verl.utils.pictures import MULTI_MODAL_DATA

logger = logging.getLogger(__name__)


class Rollouts(Protocol):
    """Generates responses with any number of engines and agent loops."""

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One response per row of `prompts`, in order: the generated columns alone, and `meta_info["timing"]`.

        `meta_info["validate"]` of the prompts selects validation sampling. After a failure the same object may be given
        again: what was generated of it by then may be in the result.
        """

    def set_servers(self, server_handles: Sequence[Any]) -> int:
        """Use these servers from the next batch on. Restarts dead workers and returns their number."""

    @property
    def workers(self) -> list[Any]:
        """The worker actors. Their `generate_sequences` accepts any part of a batch."""


@dataclass(frozen=True)
class Generation:
    """A batch that is being generated."""

    future: Future[DataProto]
    """Done when no request of the batch is running any more."""
    _healed: Callable[[], DataProto]

    @classmethod
    def of(cls, generated: DataProto) -> Generation:
        """One that is over."""
        future: Future[DataProto] = Future()
        future.set_result(generated)
        return cls(future, future.result)

    def result(self) -> DataProto:
        """Wait, and return or raise what `generate_sequences` would; dead engines are healed likewise."""
        return self._healed()

    def abandon(self) -> None:
        """Wait until no request of the batch is running; discard responses and errors."""
        wait([self.future])


class HealingRollouts:
    """`Rollouts` that has dead engines and workers restarted, then generates what is missing of the batch.

    While another engine lives, the agent loops send the dead engine's requests there, and no call fails.
    """

    def __init__(self, rollouts: Rollouts, servers: Callable[[], Sequence[Any]], recovery: Recovery) -> None:
        """`servers` returns those in service. `recovery` watches the workers of `rollouts` from now on."""
        self._rollouts = rollouts
        self._recovery = recovery
        self._background = ThreadPoolExecutor(1, thread_name_prefix="generation")
        recovery.watch(AGENT_LOOPS, lambda: rollouts.set_servers(servers()))

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Raises the error of the last attempt, or the first error if no engine or worker had died."""
        return self._healing(prompts, partial(self._rollouts.generate_sequences, prompts), self.changes)

    @property
    def workers(self) -> list[Any]:
        """The agent loops' actors, for callers that distribute samples themselves."""
        return self._rollouts.workers

    def start(self, prompts: DataProto, keep: Callable[[DataProto], None] | None = None) -> Generation:
        """Generate in the background, one batch at a time. Only `Generation.result` heals, on the caller's thread.

        `keep` is called with what was generated before anybody else has it; it must return at once.
        """

        def generate() -> DataProto:
            generated = self._rollouts.generate_sequences(prompts)
            if keep is not None:
                keep(generated)
            return generated

        future = self._background.submit(generate)
        return Generation(future, partial(self._healing, prompts, future.result, self.changes, generate))

    @property
    def changes(self) -> int:
        """How many engines and workers have been restarted or given up so far, by all callers."""
        return self._recovery.changes(BATCH)

    def recovers(self, *, since: int, tried: int) -> bool:
        """Restart dead engines and workers. True if the failed call may be tried again; see `Recovery.recovers`."""
        return self._recovery.recovers(BATCH, since=since, tried=tried)

    def _healing(
        self,
        prompts: DataProto,
        attempt: Callable[[], DataProto],
        since: int,
        generate: Callable[[], DataProto] | None = None,
    ) -> DataProto:
        """`since`: `changes` when the attempt began. A sync may have healed what died since. `generate`: a further
        attempt, if that is another one than the first."""

        def again(_: Exception) -> DataProto:
            logger.warning("generating the batch of %d samples again", len(prompts))
            return (generate or attempt)()

        return self._recovery.attempt(BATCH, attempt, failures=(Exception,), again=again, since=since)

    def set_servers(self, server_handles: Sequence[Any]) -> int:
        restarted = self._rollouts.set_servers(server_handles)
        self._recovery.found(AGENT_LOOPS, restarted)
        return restarted


def joined(prompts: DataProto, generated: DataProto) -> DataProto:
    """A new batch with the columns of `prompts` and what was generated from them. Pictures are those of the whole
    conversations, if `generated` has them. Raises the errors of `DataProto.union`."""
    columns = dict(prompts.non_tensor_batch)
    if MULTI_MODAL_DATA in generated.non_tensor_batch:
        columns.pop(MULTI_MODAL_DATA, None)
    return DataProto(prompts.batch, columns, dict(prompts.meta_info)).union(generated)
