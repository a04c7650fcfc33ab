"""Writes the checkpoints of a training loop, synchronously or in the background."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from pathlib import Path

from verl.checkpoint_engine.support.loop_thread import LoopThread
from verl.single_controller.errors import WorkerGroupError
from verl.single_controller.future import WorkerFuture
from verl.trainer.checkpoints import CheckpointDirectory, TrainerState
from verl.utils.disk import DiskFull
from verl.workers.engine.background import Written

logger = logging.getLogger(__name__)


class Saves:
    """Writes one checkpoint at a time. Used on the driver's main thread."""

    def __init__(
        self, checkpoints: CheckpointDirectory, loop: LoopThread, *, in_background: bool, stops_on_full_disk: bool
    ) -> None:
        """Without `stops_on_full_disk`, a full disk leaves a step unsaved, and the next save tries again."""
        self._checkpoints, self._loop = checkpoints, loop
        self._in_background, self._stops_on_full_disk = in_background, stops_on_full_disk
        self._step = 0
        self._writing: Future[None] | None = None
        self._publishing: Future[None] | None = None
        self._unsaved: DiskFull | None = None
        """Why the last checkpoint that was due is not there."""
        self._metrics: dict[str, float] = {}

    def save(
        self,
        state: TrainerState,
        begin: Callable[[Path], None],
        written: Callable[[], WorkerFuture],
        *,
        wait: bool,
    ) -> None:
        """Have trainer ranks `begin` to write to a directory; `written` returns a future of their completion.

        Waits for the previous save. Raises the error of either save. If ranks died during the previous save, their next
        call raises it.
        """
        began = time.monotonic()
        self._settle()
        self._step, self._unsaved = state.step, None
        try:
            with ExitStack() as opened:
                directory = opened.enter_context(self._checkpoints.writing(state))
                try:
                    begin(directory)
                except BaseException:
                    _end(written)  # nobody writes into what is about to be deleted
                    raise
                self._writing = self._loop.start(self._written(written(), opened.pop_all()))
            if wait or not self._in_background:
                writing, self._writing = self._writing, None
                writing.result()
        except DiskFull as exc:
            self._tell(exc)
        self._metrics["checkpoint/blocked_s"] = time.monotonic() - began

    def publish(self) -> None:
        """Publish the last save, once its checkpoint is written; the records of its step are on disk.

        Raises DiskFull if the disk was full and `stops_on_full_disk`. The next save raises other failures.
        """
        if self._writing is None:
            self._checkpoints.publish()
        elif self._publishing is None:
            self._publishing = self._loop.start(self._published(self._writing))
        elif self._publishing.done() and isinstance(self._publishing.exception(), (DiskFull, type(None))):
            self._settle()

    def metrics(self) -> dict[str, float]:
        """Metrics of the saves since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def end(self) -> None:
        """Wait for the current save to end after the loss of trainer ranks, whose files may be incomplete."""
        self._settle()

    def close(self) -> None:
        """End the last save. Raises DiskFull if the last checkpoint is missing."""
        self._settle()
        if self._unsaved is not None:  # there is no next save
            raise self._unsaved

    async def _written(self, written: WorkerFuture, opened: ExitStack) -> None:
        with ExitStack() as pending:
            pending.push(opened)
            ranks: list[Written] = await written
            await asyncio.to_thread(pending.pop_all().close)
        if self._in_background:
            self._metrics["checkpoint/background_s"] = max(rank.background_s for rank in ranks)
            waited_s = max(rank.waited_s for rank in ranks)
            self._metrics["checkpoint/step_waited_s"] = waited_s

    async def _published(self, writing: Future[None]) -> None:
        await asyncio.wrap_future(writing)
        await asyncio.to_thread(self._checkpoints.publish)

    def _settle(self) -> None:
        """Wait until nothing is being written."""
        ending = self._publishing or self._writing
        self._publishing = self._writing = None
        if ending is None:
            return
        try:
            ending.result()
        except DiskFull as exc:
            self._tell(exc)
        except (WorkerGroupError, CancelledError) as exc:
            logger.warning("step %d is not saved: %s", self._step, str(exc).splitlines()[0])

    def _tell(self, exc: DiskFull) -> None:
        if self._stops_on_full_disk:
            raise exc
        self._unsaved = exc
        logger.error("step %d is not saved, the next save tries again: %s", self._step, exc)


def _end(written: Callable[[], WorkerFuture]) -> None:
    try:
        written().get()
    except Exception:
        logger.debug("what was begun of a checkpoint is not there", exc_info=True)
