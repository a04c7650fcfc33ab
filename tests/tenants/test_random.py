"""Tenants of two keys do random things at the same time, with faults; each one gets what it gets when it is alone."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from tests.tenants.test_engine_sampler import FakeEngine, said
from tests.tenants.test_training import ADAM, PROMPT, adapter_of, batches
from tests.tenants.wire_client import Refusal, Server, samples
from verl.tenants.engine import EngineDied
from verl.tenants.engine_sampler import EngineSampler
from verl.tenants.refused import Refused
from verl.tenants.sampler import Asked
from verl.tenants.wire import MESSAGES
from verl.utils.builtin import make_tiny_model

KEYS = {"tml-ann": "ann", "tml-bob": "bob"}
LOSSES = ("cross_entropy", "importance_sampling", "ppo")


class Script:
    """What one tenant does, by its seed; `faults` decides what is sent again, and who tries what is another's."""

    def __init__(self, client, seed, output, operations, faults=None):
        self.client, self.seed, self.output, self.faults = client, seed, output, faults
        self.operations = operations
        self.choice = random.Random(1)
        self.got = []
        """What it was answered, without names."""
        self.samplers, self.sampled, self.paths = [], 0, []

    async def run(self, others=()):
        self.tenant = await self.client.tenant(seed=self.seed, rank=2 + self.seed % 3)
        for _ in range(self.operations):
            operation = self.choice.choice(
                ("batch", "batch", "step", "sampler", "sample", "sample", "save", "load", "bad")
            )
            try:
                self.got.append((operation, await getattr(self, operation)()))
            except Refusal as refused:
                self.got.append((operation, str(refused).replace(self.tenant.model_id, "").partition("(")[0]))
            for other in others:
                if self.faults is not None and self.faults.random() < 0.1 and hasattr(other, "tenant"):
                    await self.meddle(other)
        path = await self.tenant.save("final")
        file = adapter_of(self.output, path, KEYS[self.client.key]) / "adapter_model.safetensors"
        self.got.append(("final", file.read_bytes()))

    async def again(self, call):
        """Done once however often it is sent; `call` is a function that sends the same thing."""
        times = 1 if self.faults is None else self.faults.choice((1, 1, 2, 3))
        promises = await asyncio.gather(*(call() for _ in range(times)))
        assert all(promise == promises[0] for promise in promises)
        found = [await self.client.result(promise) for promise in promises]
        assert all(each == found[0] for each in found)
        return found[0]

    async def batch(self):
        loss = self.choice.choice(LOSSES)
        data = batches(loss, steps=1, seed=self.choice.randrange(10**6))[0]
        number = self.tenant.next()["seq_id"]
        return await self.again(lambda: self.tenant.submit_batch(data, loss, seq_id=number))

    async def step(self):
        fields = self.tenant.next()
        found = await self.again(lambda: self.client.call("optim_step", **fields, adam_params=ADAM))
        return found["metrics"]

    async def bad(self):
        return await self.tenant.batch(batches("cross_entropy", steps=1)[0], "dro")

    async def sampler(self):
        fields = self.tenant.next() | {"sampling_session_seq_id": self.seed * 1000 + len(self.samplers)}
        found = await self.again(lambda: self.client.call("save_weights_for_sampler", **fields))
        self.samplers.append(found["sampling_session_id"])

    async def sample(self):
        if not self.samplers:
            return None
        sampler, self.sampled = self.choice.choice(self.samplers), self.sampled + 1
        params = {"max_tokens": 3, "seed": self.choice.randrange(1000), "stop": []}
        twice = 1 if self.faults is None else self.faults.choice((1, 2))
        found = [
            samples(await self.client.sample(sampler, self.sampled, PROMPT, **params, num_samples=2))
            for _ in range(twice)
        ]
        return [[(tokens, logprobs.tobytes()) for tokens, logprobs, _ in each] for each in found][-1]

    async def save(self):
        fields = self.tenant.next() | {"path": f"state-{len(self.paths)}"}
        found = await self.again(lambda: self.client.call("save_weights", **fields))
        self.paths.append(found["path"])

    async def load(self):
        if not self.paths:
            return None
        asked = {"path": self.choice.choice(self.paths), "optimizer": self.choice.random() < 0.5}
        fields = self.tenant.next() | asked
        await self.again(lambda: self.client.call("load_weights", **fields))
        return asked["optimizer"]

    async def meddle(self, other):
        """What is another's is refused, and leaves no trace there."""
        if other.client.key == self.client.key:
            return
        theirs = {"model_id": other.tenant.model_id, "seq_id": other.tenant.seq_id + 1}
        asked = [("optim_step", theirs | {"adam_params": ADAM}), ("save_weights", theirs | {"path": "theirs"})]
        asked += [("load_weights", theirs | {"path": path, "optimizer": True}) for path in other.paths[:1]]
        for name, fields in asked:
            with pytest.raises(Refusal, match="of this key"):
                await self.client.call(name, **fields)


@pytest.mark.parametrize(
    ("tenants", "operations"), [(3, 14), pytest.param(6, 100, marks=[pytest.mark.cells(7), pytest.mark.job])]
)
async def test_tenants_that_do_random_things_get_what_they_get_alone(tmp_path, tenants, operations):
    model = make_tiny_model(tmp_path / "model", "qwen3", layers=1)
    scripts = {}
    for together in (True, False):
        output = tmp_path / str(together)
        async with Server(model, output, keys=KEYS) as server:
            made = []
            for number in range(tenants):
                client = await server.client(list(KEYS)[number % 2])
                faults = random.Random(number) if together else None
                made.append(Script(client, number, output, operations, faults))
            if together:
                await asyncio.gather(*(script.run(made) for script in made))
            else:
                for script in made:
                    await script.run()
            scripts[together] = made
    for one, other in zip(scripts[True], scripts[False], strict=True):
        assert one.got == other.got
    assert len({script.got[-1] for script in scripts[True]}) == tenants
    done = {operation for script in made for operation, *_ in script.got[:-1]}
    assert done >= {"batch", "step", "sampler", "sample", "save", "load"}


class FaultyEngine(FakeEngine):
    """Dies, and fails to load, by chance."""

    def __init__(self, chance, events):
        super().__init__(3, events, goes_on=True)
        self.chance = chance

    async def load(self, version):
        await asyncio.sleep(0)
        if self.chance.random() < 0.01:
            raise Refused("its files have changed")
        await super().load(version)

    async def draw(self, prompt, drawing, digest):
        async for part in super().draw(prompt, drawing, digest):
            await asyncio.sleep(0)
            if self.chance.random() < 0.0003:
                self.die()
            yield part


class NoPrompt:
    async def score(self, version, asked):
        return None, None


@dataclass(frozen=True)
class Saved:
    digest: str

    def tensors(self):
        return {}


async def test_ten_thousand_samples_of_engines_that_die_are_each_of_their_own_version():
    chance = random.Random(7)
    versions = [None, *(Saved(f"{chance.getrandbits(64):016x}") for _ in range(8))]
    engines, outcomes = [], Counter()

    def start():
        engines.append(FaultyEngine(chance, []))
        return engines[-1]

    sampler = EngineSampler(start, NoPrompt(), SimpleNamespace(decode=str), vocabulary=64)
    await sampler.start()
    asked = Asked(prompt=np.array(PROMPT), number=2, max_tokens=4)

    async def tenant(seed):
        choice = random.Random(seed)
        for _ in range(500):
            version = choice.choice(versions)
            try:
                message = MESSAGES["SampleResponse"]()
                message.ParseFromString(await sampler.sample(version, asked))
            except (Refused, EngineDied) as exc:
                outcomes[type(exc)] += 1
                continue
            wanted = said(version and version.digest)[:4]
            assert [tokens for tokens, *_ in samples(message)] == [wanted, wanted]
            outcomes["sampled"] += 1

    await asyncio.wait_for(asyncio.gather(*map(tenant, range(20))), 300)
    assert outcomes.total() == 10_000
    assert outcomes["sampled"] > 9_000
    assert outcomes[Refused] > 10
    assert len(engines) > 5
    assert all(engine.closed for engine in engines[:-1])
    assert not any(engine.under_way for engine in engines)
