"""Answers in the middle of which their server is killed, and what has to become of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import psutil
import pytest

from tests.workers.rollout.conftest import MAX_MODEL_LEN, Served, Trainer
from verl.experimental.agent_loop import ServerManager
from verl.experimental.agent_loop.unfinished import Told
from verl.workers.rollout import RolloutReplica, SamplingOptions, TokenOutput
from verl.workers.rollout.written_calls import CallDirectory

PROMPTS = [[3 + number, 4, 5, 6] for number in range(4)]
GREEDY = SamplingOptions(max_tokens=MAX_MODEL_LEN - 4, temperature=0.0, ignore_eos=True)
FEW = 5
WITHIN_S = 120.0
ATTEMPTS = 20
"""On a busy machine an engine may be done before it is told to stop."""


@dataclass
class Broken:
    """Greedy answers to PROMPTS by two replicas, of which the first is stopped in the middle of its own."""

    one: RolloutReplica
    two: RolloutReplica
    directory: CallDirectory | None = None
    """Into which servers write, which are never asked then."""
    tasks: list[asyncio.Task[TokenOutput]] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    """What each had generated before."""
    calls: Mapping[str, Told] = field(default_factory=dict)
    """Those of the first one that are under way."""

    async def begin(self, update: Callable[[], Awaitable[None]] | None = None) -> None:
        """Until the first one has been paused in the middle, and has told of all that it has sampled. With `update` it
        goes on after that for some tokens, and is paused again."""
        for _ in range(ATTEMPTS):
            self.before = [await generated(replica) for replica in (self.one, self.two)]
            handles = [self.one.server_handle, self.two.server_handle]
            asked_every_s = 0.01 if self.directory is None else 10 * WITHIN_S
            servers = ServerManager(handles, timeout_s=WITHIN_S, told_every_s=asked_every_s, directory=self.directory)
            self.calls = servers._servers[0].listener._calls
            self.tasks = [
                asyncio.create_task(servers.generate(f"{id(servers)}-{number}", prompt, GREEDY))
                for number, prompt in enumerate(PROMPTS)
            ]
            await self.paused_after(FEW)
            if update is not None and self.told:
                await update()
                await self.one.resume()
                await self.paused_after(self.told + FEW)
            if self.told:
                has = await self.one.server_handle.tokens_since.remote(dict.fromkeys(self.calls, 0))
                number = sum(len(output.token_ids) for output in has.values())
                await until(lambda number=number: sum(call.num_tokens for call in self.calls.values()) == number)
                return
            await self.one.resume()
            await asyncio.gather(*self.tasks)
        pytest.fail(f"the engine was done with {GREEDY.max_tokens} tokens before it could be paused, each time")

    async def paused_after(self, number: int) -> None:
        await until(lambda: any(task.done() for task in self.tasks) or self.told >= number)
        await self.one.pause("keep")

    @property
    def told(self) -> int:
        """The fewest tokens that are known of one of its two calls; 0 if one of them has ended."""
        return min(call.num_tokens for call in self.calls.values()) if len(self.calls) == 2 else 0

    async def kill(self) -> list[psutil.Process]:
        """The first one's server. The processes that should be gone then."""
        server = psutil.Process(await self.one.server_handle.pid.remote())
        processes = [server, *server.children(recursive=True)]
        server.kill()
        return processes

    async def answers(self) -> list[TokenOutput]:
        return await asyncio.wait_for(asyncio.gather(*self.tasks), WITHIN_S)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - it changes in other processes
            await asyncio.sleep(0.005)


def tokens_by(replica: RolloutReplica, outputs: Sequence[TokenOutput]) -> int:
    spans = [span for output in outputs for span in output.weight_versions]
    return sum(span.stop - span.start for span in spans if span.replica == replica.name)


async def generated(replica: RolloutReplica) -> float:
    """Tokens that a vLLM with `disable_log_stats=False` has counted; 0 of another engine."""
    return await replica.server_handle.__ray_call__.remote(_count)


def _count(server: object) -> float:
    from prometheus_client import REGISTRY

    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    return sum(sample.value for sample in samples if sample.name == "vllm:generation_tokens_total")


def assert_log_probs_are_of_their_versions(trainer: Trainer, prompt: list[int], output: TokenOutput) -> None:
    for span in output.weight_versions:
        expected = trainer.log_probs(span.version, prompt, output.token_ids, 1.0)[span.start : span.stop]
        assert output.log_probs[span.start : span.stop] == pytest.approx(expected, abs=2e-4)


async def assert_they_go_on_as_if_nothing_had_happened(
    one: RolloutReplica, two: RolloutReplica, trainer: Trainer
) -> list[psutil.Process]:
    """Two replicas of vLLM that serve version 1. Kills the server of the first one; returns what should be gone."""
    served = Served(two, trainer)
    whole = [
        await served.generate(prompt, max_tokens=GREEDY.max_tokens, temperature=0.0, ignore_eos=True)
        for prompt in PROMPTS
    ]
    with closing(CallDirectory()) as directory:
        broken = Broken(one, two, directory)
        await broken.begin()
        sampled = await generated(one) - broken.before[0]
        killed = await broken.kill()
        outputs = await broken.answers()
    for prompt, output, unbroken in zip(PROMPTS, outputs, whole, strict=True):
        assert output.token_ids == unbroken.token_ids
        assert output.stop_reason == "length"
        assert_log_probs_are_of_their_versions(trainer, prompt, output)
    kept, number = tokens_by(one, outputs), sum(len(output.token_ids) for output in outputs)
    assert kept == sampled >= 2 * FEW  # nothing that the first one sampled is lost
    await until_counted(two, broken.before[1] + number - kept)  # and nothing of it was sampled twice
    return killed


async def until_counted(replica: RolloutReplica, number: float) -> None:
    """vLLM counts a token just after it has given it away."""
    async with asyncio.timeout(WITHIN_S):
        while (found := await generated(replica)) < number:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
    assert found == number
