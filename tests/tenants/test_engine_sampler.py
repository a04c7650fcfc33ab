"""An engine samples beside the thread that trains: which versions it holds, when it dies, and what ends a sample."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from tests.checkpoint_engine.fakes import soon
from tests.tenants.test_training import ADAM, PROMPT, adapter_of, batches
from tests.tenants.wire_client import Refusal, Server, samples
from verl.tenants.engine import Drawn, EngineDied
from verl.tenants.engine_sampler import EngineSampler
from verl.tenants.refused import Refused
from verl.utils.builtin import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", layers=1)


class FakeEngine:
    """Says the version's digits, one token at a time, as fast as the test lets it."""

    def __init__(self, slots, events, *, goes_on):
        self.slots, self.events, self.held, self.dead = slots, events, set(), False
        self.goes_on = asyncio.Event()
        if goes_on:
            self.goes_on.set()
        self.begun = asyncio.Semaphore(0)
        self.under_way = 0
        self.closed = False

    async def check(self):
        self.events.append("started")

    def require(self, shape):
        if shape.mlp:
            raise Refused("adapters of the mlp are not sampled")

    async def load(self, version):
        self.alive()
        version.tensors()
        assert len(self.held) < self.slots
        self.held.add(version.digest)
        self.events.append(f"load {version.digest}")

    async def unload(self, digest):
        self.alive()
        self.held.remove(digest)
        self.events.append(f"unload {digest}")

    async def draw(self, prompt, drawing, digest):
        self.alive()
        self.under_way += 1
        self.begun.release()
        try:
            for token in said(digest)[: drawing.max_tokens]:
                await self.goes_on.wait()
                self.alive()
                assert digest is None or digest in self.held
                yield [Drawn(token, -1.0, [(token, -1.0)] * drawing.likeliest)]
                if token in drawing.stop_tokens:
                    return
        finally:
            self.under_way -= 1
            self.events.append("drawn")

    async def has_begun(self, number):
        for _ in range(number):
            await self.begun.acquire()

    def alive(self):
        if self.dead:
            raise EngineDied("the engine died")

    def die(self):
        self.dead = True
        self.goes_on.set()

    def close(self):
        self.closed = True


def said(digest):
    return [40 + int(digit, 16) for digit in (digest or "0" * 8)[:8]]


@asynccontextmanager
async def served(model, output, *, slots=2, engines=None, goes_on=True, **options):
    """A server with fake engines, those that were made, and what they did. `engines`: whether each one starts."""
    made, events = [], []

    def start():
        if engines is not None and not engines.pop(0):
            raise OSError("no room for an engine")
        made.append(FakeEngine(slots, events, goes_on=goes_on))
        return made[-1]

    def make(own, base):
        return EngineSampler(start, own, base.tokenizer, base.vocabulary)

    async with Server(model, output, make_sampler=make, **options) as server:
        await server.sampler.start()
        yield server, made, events


async def tenants(client, number):
    """Samplers of as many versions, which are different."""
    found = []
    for index in range(number):
        tenant = await client.tenant(seed=index, train_mlp=False)
        path = await tenant.save(f"v{index}", "save_weights_for_sampler")
        asked = {"session_id": client.session, "sampling_session_seq_id": index, "model_path": path}
        found.append((await client.call("create_sampling_session", **asked))["sampling_session_id"])
    return found


async def test_a_version_is_loaded_once_and_the_longest_unused_one_makes_room(model, tmp_path):
    async with served(model, tmp_path) as (server, (engine,), events):
        client = await server.client()
        first, second, third = await tenants(client, 3)
        heard = {}
        for number, sampler in enumerate((first, second, first, third, first, second)):
            ((heard[sampler], _, _),) = samples(await client.sample(sampler, number, PROMPT, max_tokens=8))
        loads = [event for event in events if "load" in event]
        one, two, three = dict.fromkeys(event.split()[1] for event in loads)
        assert loads == [
            f"load {one}", f"load {two}", f"unload {two}", f"load {three}", f"unload {three}", f"load {two}",
        ]  # fmt: skip
        assert [heard[sampler] for sampler in (first, second, third)] == [said(each) for each in (one, two, three)]
        assert engine.held == {one, two}


async def test_a_version_makes_no_room_while_a_sample_uses_it(model, tmp_path):
    async with served(model, tmp_path, slots=1) as (server, (engine,), events):
        client = await server.client()
        first, second = await tenants(client, 2)
        engine.goes_on.clear()
        asked = [asyncio.create_task(client.sample(sampler, 0, PROMPT, max_tokens=8)) for sampler in (first, second)]
        await engine.has_begun(1)
        (one,) = engine.held
        assert events == ["started", f"load {one}"]
        engine.goes_on.set()
        found = [samples(await each)[0][0] for each in asked]
        (two,) = engine.held
        assert events == ["started", f"load {one}", "drawn", f"unload {one}", f"load {two}", "drawn"]
        assert sorted(found) == sorted([said(one), said(two)])


async def test_a_version_is_loaded_when_a_sampler_of_it_is_saved_unless_all_places_are_used(model, tmp_path):
    async with served(model, tmp_path, slots=1) as (server, (engine,), events):
        client = await server.client()
        tenant = await client.tenant(train_mlp=False)
        sampler = await tenant.sampler(0)
        await asyncio.to_thread(soon, lambda: engine.held)
        (first,) = engine.held
        engine.goes_on.clear()
        asked = [await client.submit_sample(sampler, 0, PROMPT, max_tokens=8)]
        await engine.has_begun(1)
        await tenant.train(batches("cross_entropy")[0], **ADAM)
        other = await tenant.sampler(1)
        asked.append(await client.submit_sample(sampler, 1, PROMPT, max_tokens=8))
        await engine.has_begun(1)  # nobody waits for the version that has no place
        assert events == ["started", f"load {first}"]
        engine.goes_on.set()
        found = [samples(await client.sampled(each))[0][0] for each in asked]
        assert found == [said(first)] * 2
        assert samples(await client.sample(other, 0, PROMPT, max_tokens=8))[0][0] != said(first)


async def test_samples_of_several_tenants_run_at_once_while_training_goes_on(model, tmp_path):
    async with served(model, tmp_path) as (server, (engine,), _):
        client = await server.client()
        first, second = await tenants(client, 2)
        trained = await client.tenant(train_mlp=False)
        engine.goes_on.clear()
        asked = [
            asyncio.create_task(client.sample(sampler, 0, PROMPT, max_tokens=8, num_samples=3))
            for sampler in (first, second)
        ]
        await engine.has_begun(6)
        await trained.train(batches("cross_entropy")[0], **ADAM)
        assert not any(each.done() for each in asked)
        engine.goes_on.set()
        assert [len(samples(await each)) for each in asked] == [3, 3]


async def test_a_request_that_is_repeated_is_drawn_once(model, tmp_path):
    async with served(model, tmp_path) as (server, _, events):
        client = await server.client()
        (sampler,) = await tenants(client, 1)
        found = await asyncio.gather(*(client.sample(sampler, 0, PROMPT, max_tokens=8) for _ in range(3)))
        assert found[0] == found[1] == found[2]
        assert events.count("drawn") == 1


async def test_requests_of_an_engine_that_dies_are_begun_again_with_another(model, tmp_path):
    async with served(model, tmp_path) as (server, made, events):
        client = await server.client()
        first, second = await tenants(client, 2)
        made[0].goes_on.clear()
        asked = [asyncio.create_task(client.sample(sampler, 0, PROMPT, max_tokens=8)) for sampler in (first, second)]
        await made[0].has_begun(2)
        digests = list(dict.fromkeys(event.split()[1] for event in events if "load" in event))
        made[0].die()
        found = [samples(await each)[0][0] for each in asked]
        assert sorted(found) == sorted(map(said, digests))
        assert (len(made), made[0].closed, made[1].closed) == (2, True, False)
        assert made[1].held == set(digests)


async def test_a_request_at_two_deaths_fails_and_the_next_one_is_served(model, tmp_path):
    async with served(model, tmp_path, goes_on=False) as (server, made, events):
        client = await server.client()
        (sampler,) = await tenants(client, 1)
        asked = asyncio.create_task(client.sample(sampler, 0, PROMPT, max_tokens=8))
        await made[0].has_begun(1)
        made[0].die()
        await asyncio.to_thread(soon, lambda: len(made) == 2)
        await made[1].has_begun(1)
        made[1].die()
        with pytest.raises(Refusal, match="EngineDied: .*under way at 2 deaths, send it again"):
            await asked
        again = asyncio.create_task(client.sample(sampler, 1, PROMPT, max_tokens=2))
        await asyncio.to_thread(soon, lambda: len(made) == 3)
        made[2].goes_on.set()
        assert samples(await again)


async def test_an_engine_that_does_not_start_again_fails_requests_until_it_does(model, tmp_path):
    async with served(model, tmp_path, engines=[True, False, True]) as (server, made, _):
        client = await server.client()
        (sampler,) = await tenants(client, 1)
        made[0].die()
        with pytest.raises(Refusal, match="OSError: no room for an engine"):
            await client.sample(sampler, 0, PROMPT, max_tokens=8)
        assert samples(await client.sample(sampler, 1, PROMPT, max_tokens=8))


async def test_a_version_that_cannot_be_loaded_takes_no_slot(model, tmp_path):
    async with served(model, tmp_path, slots=1) as (server, (engine,), _):
        client = await server.client()
        broken, whole = await tenants(client, 2)
        path = (await client.get(f"samplers/{broken}"))["model_path"]
        file = adapter_of(tmp_path, path) / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        for number in range(3):
            with pytest.raises(Refusal, match="its files have the digest"):
                await client.sample(broken, number, PROMPT, max_tokens=8)
        ((tokens, _, _),) = samples(await client.sample(whole, 0, PROMPT, max_tokens=8))
        assert [tokens] == [said(digest) for digest in engine.held]


async def test_a_stop_ends_a_sample_with_the_token_that_completes_it(model, tmp_path):
    async with served(model, tmp_path) as (server, (engine,), _):
        client = await server.client()
        (sampler,) = await tenants(client, 1)
        ((whole, _, reason),) = samples(await client.sample(sampler, 0, PROMPT, max_tokens=8))
        assert (len(whole), reason) == (8, 1)
        text = server.base.tokenizer.decode(whole[:3])
        ends = next(n for n in range(1, 9) if text in server.base.tokenizer.decode(whole[:n]))
        found = await client.sample(sampler, 1, PROMPT, max_tokens=8, stop=[text], topk_sample_logprobs=2)
        ((tokens, logprobs, reason),) = samples(found)
        assert (tokens, len(logprobs), reason) == (whole[:ends], ends, 0)
        assert found.sequences[0].topk_sampled_logprobs.length == ends
        ((tokens, _, reason),) = samples(await client.sample(sampler, 2, PROMPT, max_tokens=8, stop=[whole[0]]))
        assert (tokens, reason) == (whole[:1], 0)
        assert engine.under_way == 0


async def test_prompts_are_scored_in_this_process(model, tmp_path):
    async with served(model, tmp_path) as (server, _, _), Server(model, tmp_path / "own") as plain:
        found = []
        for each in (server, plain):
            client = await each.client()
            (sampler,) = await tenants(client, 1)
            asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 2}
            found.append(await client.sample(sampler, 0, PROMPT, max_tokens=1, **asked))
    assert found[0].prompt_logprobs == found[1].prompt_logprobs
    assert found[0].topk_prompt_logprobs == found[1].topk_prompt_logprobs
    assert np.isfinite(np.frombuffer(found[0].prompt_logprobs, "<f4")).tolist() == [False, True, True, True]


async def test_adapters_that_the_engine_cannot_compute_are_refused_when_they_are_asked_for(model, tmp_path):
    async with Server(model, tmp_path) as plain:
        path = await (await (await plain.client()).tenant()).save("whole")
    async with served(model, tmp_path) as (server, _, _):
        client = await server.client()
        with pytest.raises(Refusal, match="adapters of the mlp are not sampled"):
            await client.tenant()
        load = {"session_id": client.session, "model_seq_id": 5, "path": path, "optimizer": True}
        sampler = {"session_id": client.session, "sampling_session_seq_id": 1, "model_path": path}
        for name, asked in (("load_weights", load), ("create_sampling_session", sampler)):
            with pytest.raises(Refusal, match="adapters of the mlp are not sampled"):
                await client.call(name, **asked)


async def test_an_owner_has_so_many_requests_to_sample_under_way_and_the_totals_are_told(model, tmp_path):
    keys = {"tml-ann": "ann", "tml-bob": "bob"}
    async with served(model, tmp_path, goes_on=False, most_beside=2, keys=keys) as (server, (engine,), _):
        ann, bob = await server.client("tml-ann"), await server.client("tml-bob")
        (first,), (second,) = await tenants(ann, 1), await tenants(bob, 1)
        asked = [await ann.submit_sample(first, number, PROMPT, max_tokens=2) for number in range(2)]
        assert await ann.submit_sample(first, 1, PROMPT, max_tokens=2) == asked[1]
        with pytest.raises(Refusal, match="2 requests of this key are under way; send it again") as refused:
            await ann.submit_sample(first, 2, PROMPT, max_tokens=2)
        assert refused.value.status == 429
        asked_too = await bob.submit_sample(second, 0, PROMPT, max_tokens=2)
        assert {"verl_tenants_adapters 2.0", "verl_tenants_unanswered 3.0"} <= await totals(server)
        engine.goes_on.set()
        for client, promise in ((ann, asked[0]), (ann, asked[1]), (bob, asked_too)):
            assert samples(await client.sampled(promise))
        assert samples(await ann.sample(first, 2, PROMPT, max_tokens=2))
        made = "verl_tenants_answers_total"
        told = await totals(server)
        # of each owner: a model and a version; three samples of one and one of the other
        assert {f'{made}{{outcome="done"}} 8.0', f'{made}{{outcome="user"}} 0.0', "verl_tenants_unanswered 0.0"} <= told


async def totals(server):
    """Read without a key."""
    async with server.http.get("/metrics") as response:
        return set((await response.text()).splitlines())
