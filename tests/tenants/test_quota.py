"""Owners train and sample so many tokens a minute, and are told how long to wait for more."""

import numpy as np
import pytest

from tests.tenants.test_names import sampler_of
from tests.tenants.test_training import ADAM, PROMPT, batches
from tests.tenants.wire_client import Refusal, Server, samples
from verl.tenants.quota import Quota
from verl.tenants.refused import Refused
from verl.utils.builtin import make_tiny_model

KEYS = {"tml-ann": "ann", "tml-bob": "bob"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", layers=1)


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def test_a_quota_fills_again_by_the_second_and_to_its_size_at_most():
    clock = Clock()
    quota = Quota(60, clock)
    quota.require("ann")
    quota.take("ann", 90)  # an owner that has some left may send more
    quota.require("bob")
    for passed, wait_s in ((0, 31), (30, 1)):
        clock.now_s += passed
        with pytest.raises(Refused, match=f"60 tokens a minute, and none left; send it again in {wait_s} s") as refused:
            quota.require("ann")
        assert (refused.value.status, refused.value.after_s) == (429, wait_s)
    clock.now_s += 1
    quota.require("ann")
    clock.now_s += 3600
    quota.take("ann", 60)
    with pytest.raises(Refused):
        quota.require("ann")
    quota.take("ann", 10**6)
    with pytest.raises(Refused, match="in 60 s"):
        quota.require("ann")


async def test_tokens_that_are_trained_and_sampled_are_counted_once(model, tmp_path):
    clock = Clock()
    async with Server(model, tmp_path, keys=KEYS, quota=Quota(100, clock)) as server:
        ann, bob = await server.client("tml-ann"), await server.client("tml-bob")
        tenant = await ann.tenant()
        data = batches("cross_entropy")  # of 19 tokens each
        promise = await tenant.submit_batch(data[0])
        assert await tenant.submit_batch(data[0], seq_id=1) == promise
        await tenant.step(**ADAM)
        sampler = await tenant.sampler()
        asked = {"max_tokens": 36, "num_samples": 2, "stop": []}
        ann_s = [samples(await ann.sample(sampler, 0, PROMPT, **asked)) for _ in range(2)]
        assert [len(tokens) for tokens, *_ in ann_s[0]] == [36, 36]
        # 19 + 4 + 72 of 100
        await tenant.batch(data[1])
        for refused in (
            lambda: tenant.submit_batch(data[2], seq_id=9),
            lambda: ann.submit_sample(sampler, 1, PROMPT, max_tokens=1),
        ):
            with pytest.raises(Refusal, match="this key has 100 tokens a minute, and none left") as told:
                await refused()
            assert (told.value.status, told.value.after_s) == (429, "9")
        assert samples(await ann.sample(sampler, 0, PROMPT, **asked))  # what was done is told again
        await (await bob.tenant()).batch(data[0])
        clock.now_s += 9
        await tenant.batch(data[2], seq_id=9)
        tenant.seq_id = 9
        assert (await tenant.step(**ADAM))["metrics"]["grad_norm"] > 0


async def test_a_step_is_not_done_without_a_batch_that_was_to_wait(model, tmp_path):
    clock = Clock()
    async with Server(model, tmp_path, quota=Quota(20, clock)) as server:
        client = await server.client()
        tenant = await client.tenant()
        data = batches("cross_entropy")
        await tenant.batch(data[0])
        clock.now_s += 1
        await tenant.batch(data[0])
        with pytest.raises(Refusal, match="none left"):
            await tenant.batch(data[1])
        with pytest.raises(Refusal, match=r"is not done: forward_backward \(seq_id 3\) was to wait, and was not sent"):
            await tenant.step(**ADAM)
        clock.now_s += 600
        await tenant.train(data[1], **ADAM)
        assert np.isfinite((await tenant.batch(data[2]))[0])


async def test_a_sampler_of_a_name_waits_too(model, tmp_path):
    async with Server(model, tmp_path, quota=Quota(1, Clock())) as server:
        client = await server.client()
        await client.set_name("best", await (await client.tenant()).save("v", "save_weights_for_sampler"))
        sampler = await sampler_of(client, "tinker://names/best")
        assert samples(await client.sample(sampler, 0, PROMPT, max_tokens=1))
        with pytest.raises(Refusal, match="none left"):
            await client.sample(sampler, 1, PROMPT, max_tokens=1)
