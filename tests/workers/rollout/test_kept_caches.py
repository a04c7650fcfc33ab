"""`rollout.kv_across_versions`: what vLLM keeps, and computes with it, is what Hugging Face's model does."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from transformers import DynamicCache

from tests.workers.rollout.conftest import MAX_MODEL_LEN, Served, Trainer
from verl.experimental.agent_loop.server_manager import Sample, ServerManager
from verl.utils.builtin.tiny import make_tiny_model
from verl.workers.rollout import RolloutReplica, TokenOutput
from verl.workers.rollout.records import SamplingOptions

pytestmark = pytest.mark.vllm
BLOCK = 32
SYNCS = int(os.environ.get("VERL_TESTS_SYNCS", "12"))
WEIGHTS = 5
"""Models of which versions take their weights by turns."""
PREFIXES = [[7 + 3 * number + place % 5 for place in range(2 * BLOCK)] for number in range(2)]
"""Prompts begin with one of these."""


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    directory = tmp_path_factory.mktemp("versions")
    paths = [make_tiny_model(directory / str(number), seed=20 + number) for number in range(WEIGHTS)]
    trainer = Trainer(dict(enumerate(paths)))
    trainer.models = Turns(trainer.models)
    trainer._weights = Turns(trainer._weights)
    yield trainer
    trainer.close()


class Turns(dict):
    def __missing__(self, version: int) -> object:
        return self[version % WEIGHTS]


@pytest.fixture(scope="module")
def keeping(ray_cluster: None, make_replica: Callable[..., RolloutReplica], versions: Trainer) -> Iterator[Served]:
    options = {"kv_across_versions": "keep", "engine_kwargs": {"vllm": {"block_size": BLOCK}}}
    served = Served(make_replica("vllm", 5, **options), versions)
    asyncio.run(served.replica.init_standalone())
    yield served
    asyncio.run(served.replica.shutdown())


@dataclass
class Conversation:
    """Its tokens so far, and what an engine's cache has of them."""

    served: Served
    tokens: list[int]
    kv: list[int] = field(default_factory=list)
    """The version that computed keys and values of each token."""
    cache: str | None = None
    reusable: int = 0

    def begin(self, **options: object) -> asyncio.Future[TokenOutput]:
        sampling = SamplingOptions(ignore_eos=True, **({"max_tokens": 12} | options))
        handle, request = self.served.replica.server_handle, next(self.served.ids)
        return asyncio.ensure_future(_answer(handle.generate.remote(self.tokens, sampling, request, cache=self.cache)))

    def check(self, output: TokenOutput) -> None:
        """The log-probs are Hugging Face's, computed by each version's model for its tokens on the others' cache."""
        sampled = [span.version for span in output.weight_versions for _ in range(span.start, span.stop)]
        if not sampled:  # what was computed meanwhile is cached, and nobody knows with which weights
            self.kv, self.cache = [], None
            return
        prompt, cached, tokens = len(self.tokens), output.cached_tokens, self.tokens + output.token_ids
        computed = [sampled[0]] * (prompt - cached) + sampled[1:]
        found = [self.kv[:cached]] if self.kv else [[version] * cached for version in {sampled[0], began_with(output)}]
        assert all(len(versions) == cached for versions in found)
        (kv,) = [
            versions + computed
            for versions in found
            if output.log_probs
            == pytest.approx(log_probs(self.served.trainer, tokens, versions + computed)[prompt - 1 :], abs=3e-4)
        ][:1]
        for span in output.weight_versions:
            assert span.kv_version <= min(kv[: prompt + span.stop - 1])
        self.tokens, self.kv, self.cache, self.reusable = tokens, kv, output.cache, output.reusable


def began_with(output: TokenOutput) -> int:
    """The version that served when this conversation, or one with the same prefix, began."""
    return int(output.cache.rpartition("/")[2])


async def _answer(reference: object) -> TokenOutput:
    return await reference


def log_probs(trainer: Trainer, tokens: list[int], kv: list[int]) -> list[float]:
    """Of every token but the first; the model of version `kv[i]` computes token i with the cache of those before."""
    past, rows, place = DynamicCache(), [], 0
    with torch.inference_mode():
        for version, run in itertools.groupby(kv):
            part = tokens[place : place + len(list(run))]
            place += len(part)
            model = trainer.models[version]
            rows.append(model(torch.tensor([part]), past_key_values=past, use_cache=True).logits[0].log_softmax(-1))
    return torch.cat(rows).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


async def sync(served: Served, version: int, mode: str = "keep") -> None:
    await served.replica.pause(mode)
    served.trainer.commit(version)
    await served.replica.activate(served.trainer.arena_path, version)
    await served.replica.resume()


async def serve_first(served: Served) -> int:
    """A version newer than all before, and nothing cached."""
    served.version = getattr(served, "version", 0) + 1
    await sync(served, served.version, "abort")
    await served.replica.clear_kv_cache()
    return served.version


async def test_frozen_requests_go_on_with_their_cache_and_compute_nothing_again(keeping: Served):
    version = await serve_first(keeping)
    talks = [Conversation(keeping, PREFIXES[0] + [3 + number]) for number in range(4)]
    for _ in range(20):
        running = [talk.begin(max_tokens=MAX_MODEL_LEN - 50) for talk in talks]
        await asyncio.sleep(0.05)
        keeping.version = version = version + 1
        await sync(keeping, version)
        outputs = await asyncio.gather(*running)
        if all(len(output.weight_versions) == 2 for output in outputs):
            break
    assert {len(output.weight_versions) for output in outputs} == {2}
    for talk, output in zip(talks, outputs, strict=True):
        assert [span.kv_version for span in output.weight_versions] == [version - 1] * 2
        assert output.computed_again == 0
        talk.check(output)


async def test_a_conversation_finds_the_prefixes_it_began_with_and_a_new_one_does_not(keeping: Served):
    version = await serve_first(keeping)
    old = Conversation(keeping, PREFIXES[0] + [5])
    old.check(await old.begin())
    keeping.version += 1
    await sync(keeping, version + 1, "abort")
    new = Conversation(keeping, PREFIXES[0] + [5])
    first = await new.begin()
    assert (first.cached_tokens, first.weight_versions[0].kv_version) == (0, version + 1)
    new.check(first)
    old.tokens += [9, 10, 11]
    later = await old.begin()
    assert later.cached_tokens == len(old.kv) // BLOCK * BLOCK == old.reusable
    assert {span.kv_version for span in later.weight_versions} == {version}
    old.check(later)
    sibling = Conversation(keeping, PREFIXES[0] + [6], kv=[version] * len(PREFIXES[0]), cache=old.cache)
    output = await sibling.begin()
    assert output.cached_tokens == len(PREFIXES[0])
    sibling.check(output)


class Watched:
    """A server of which the last output is known."""

    def __init__(self, handle: object) -> None:
        self.handle, self.tokens_since, self.generate = handle, handle.tokens_since, self

    async def remote(self, **call: object) -> TokenOutput:
        self.last = await self.handle.generate.remote(**call)
        return self.last


async def conversations(keeping: Served, *, syncs: bool) -> tuple[int, int]:
    """Four of six turns, with a sync before each turn or with none. What vLLM computed of tokens that it had computed
    before, and how much of it is said to be due to the sync."""
    await serve_first(keeping)
    server = Watched(keeping.replica.server_handle)
    servers = ServerManager([server], timeout_s=240)
    samples, prompts, computed = [Sample() for _ in range(4)], [[*PREFIXES[0], 5 + n] for n in range(4)], 0
    for turn in range(6):
        if turn and syncs:
            keeping.version += 1
            await sync(keeping, keeping.version)
        for number, sample in enumerate(samples):
            before = len(prompts[number]) - 4 if turn else 0  # without the tool's, and the last that was sampled
            sampling = SamplingOptions(max_tokens=13, ignore_eos=True)
            output = await servers.generate(f"{syncs} {number}", prompts[number], sampling, sample=sample)
            computed += max(0, before - server.last.cached_tokens)
            prompts[number] += [*output.token_ids, 7, 8, 9]
    return computed, sum(sample.computed_again for sample in samples)


async def test_of_several_turns_with_syncs_no_token_more_is_computed_than_without(keeping: Served):
    computed, lost = await conversations(keeping, syncs=False)
    assert computed > 0  # rests of turns that fill no block
    assert lost == 0
    assert await conversations(keeping, syncs=True) == (computed, 0)


async def test_a_return_to_an_older_version_leaves_nothing(keeping: Served):
    version = await serve_first(keeping)
    talk = Conversation(keeping, PREFIXES[0] + [5])
    talk.check(await talk.begin())
    await sync(keeping, version - 1, "abort")
    output = await talk.begin()
    assert output.cached_tokens == 0
    assert {span.kv_version for span in output.weight_versions} == {version - 1}
    talk.check(output)


async def test_random_requests_over_many_versions_attend_to_what_their_records_say(keeping: Served):
    rng = random.Random(int(os.environ.get("VERL_TESTS_DAY", "0")))
    version = await serve_first(keeping)
    talks: list[Conversation] = []
    again, hits = 0, 0
    for _ in range(SYNCS):
        for _ in range(5):
            if not talks or rng.random() < 0.5:
                tail = [rng.randrange(3, 60) for _ in range(rng.randrange(1, 40))]
                talks.append(Conversation(keeping, rng.choice(PREFIXES) + tail))
            talk = rng.choice(talks)
            output = await talk.begin(max_tokens=rng.randrange(1, 24))
            hits += output.cached_tokens if talk.kv else 0
            talk.check(output)
            talk.tokens = talk.tokens + [rng.randrange(3, 60)]
        chosen = rng.sample(talks, min(3, len(talks)))
        running = [talk.begin(max_tokens=60) for talk in chosen]
        await asyncio.sleep(rng.random() / 10)
        keeping.version = version = version + 1
        await sync(keeping, version, rng.choice(["keep", "abort", "wait"]))
        for talk, output in zip(chosen, await asyncio.gather(*running), strict=True):
            again += max(0, min(len(talk.kv), len(talk.tokens)) - output.cached_tokens)
            talk.check(output)
        talks = [talk for talk in talks if len(talk.tokens) < MAX_MODEL_LEN - 100]
    assert hits > 0
