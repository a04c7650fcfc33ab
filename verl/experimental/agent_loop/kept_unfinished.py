"""What a worker has of samples that are not complete, in a file that outlives its driver: `rollout.keep_tokens`.

    <output_dir>/kept_samples/0.unfinished    0600; of worker 0; written anew again and again

It may be older than EVERY_S, so that it costs little. In a resumed run the worker of the same rank goes on with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from verl.experimental.agent_loop.attempts import Call
from verl.experimental.agent_loop.unfinished import Partial
from verl.trainer.plain_state import packed, unpacked
from verl.utils.config import ConfigError
from verl.utils.framed import append, frames
from verl.workers.rollout.records import TokenOutput, WeightVersionSpan

logger = logging.getLogger(__name__)

EVERY_S = 0.05
SHARE = 50
"""Of the loop's time, at most the reciprocal goes into it: with much to write it is written less often."""
SHARE_OF_DISK = 20
"""Likewise of the disk's."""
MOST_TOKENS = 16 * 2**20
"""In one file. What is beyond them is generated again."""

Named = tuple[str, Call]
"""A call with the name of its sample."""


class KeptUnfinished:
    """The file of one worker. On its event loop; what is written is copied there first."""

    def __init__(self, directory: Path, rank: int, run: str, calls: Callable[[], Iterable[Named]]) -> None:
        """`run` names the run, and all that resume it. `calls` returns what there is at the moment."""
        self._path, self._run, self._calls = _path(directory, rank), run, calls
        self._is_full = False
        self._writing = asyncio.create_task(self._write_again_and_again())

    def close(self) -> None:
        """Write no more."""
        self._writing.cancel()

    async def _write_again_and_again(self) -> None:
        before: list[Any] | None = None
        while True:
            began_s = time.thread_time()
            now = [(sample, call.asked, call.num_known, call.output is None) for sample, call in self._calls()]
            if now == before:
                await asyncio.sleep(EVERY_S)
                continue
            content, before = self._content(), now
            busy_s = time.thread_time() - began_s
            try:
                write_s = await asyncio.to_thread(self._write, content)
            except OSError as exc:
                logger.warning("answers under way are not kept for a restart (rollout.keep_tokens): %s", exc)
                return
            await asyncio.sleep(max(EVERY_S, SHARE * busy_s, SHARE_OF_DISK * write_s))

    def _content(self) -> list[Any]:
        content, tokens = [], 0
        for sample, call in self._calls():
            known = call.output or call.so_far.known()
            if not known.token_ids or known.routed_experts is not None:
                continue
            tokens += len(known.token_ids)
            if tokens > MOST_TOKENS:
                if not self._is_full:
                    logger.warning(
                        "answers under way have over %d tokens: of others nothing is kept for a restart "
                        "(rollout.keep_tokens)",
                        MOST_TOKENS,
                    )
                self._is_full = True
                break
            is_complete = known.stop_reason in ("completed", "length")
            content.append((sample, call.asked, call.so_far.max_tokens, is_complete, *_plain(known)))
        return content

    def _write(self, content: list[Any]) -> float:
        """Returns the seconds that it took."""
        began_s = time.monotonic()
        new = self._path.with_suffix(".new")
        new.unlink(missing_ok=True)
        append(new, b"", {"run": self._run}, packed(content))
        os.replace(new, self._path)
        return time.monotonic() - began_s


def read(directory: Path, rank: int, run: str, up_to: int) -> dict[str, list[Call]]:
    """By sample, the calls that a worker of that rank left; with all calls before one that has tokens of a version
    after `up_to`, which the run will not have when it trains on them. Nothing of another run, or damaged."""
    path = _path(directory, rank)
    found: dict[str, list[Call]] = {}
    if not path.exists():
        return found
    with path.open("rb") as file:
        head, payload, _ = next(frames(file), ({}, b"", 0))
    if head.get("run") != run:
        return found
    try:
        content = unpacked(payload)
    except ConfigError as exc:
        logger.warning("answers under way before the restart cannot be read: %s", exc)
        return found
    later: set[str] = set()
    for sample, asked, max_tokens, is_complete, *plain in content:
        output = _output(*plain)
        if sample in later or any(span.version > up_to for span in output.weight_versions):
            later.add(sample)
            continue
        call = Call(asked, Partial(max_tokens))
        call.so_far.add(output)
        call.output = output if is_complete else None
        found.setdefault(sample, []).append(call)
    return found


def _path(directory: Path, rank: int) -> Path:
    return directory / f"{rank}.unfinished"


def _plain(output: TokenOutput) -> tuple[Any, ...]:
    return (
        np.array(output.token_ids, np.int64),
        None if output.log_probs is None else np.array(output.log_probs, np.float64),
        output.stop_reason,
        [astuple(span) for span in output.weight_versions],
        output.seen,
    )


def _output(tokens: Any, log_probs: Any, stop_reason: Any, spans: Any, seen: Any) -> TokenOutput:
    return TokenOutput(
        tokens.tolist(),
        None if log_probs is None else log_probs.tolist(),
        stop_reason,
        tuple(WeightVersionSpan(*span) for span in spans),
        seen=seen,
    )
