"""A name means one version at a time, and goes back to an earlier one in one call."""

import asyncio
import json

import pytest

from tests.tenants.test_engine_sampler import said, served
from tests.tenants.test_training import ADAM, PROMPT, adapter_of, batches
from tests.tenants.wire_client import Refusal, Server, samples
from verl.utils.builtin import make_tiny_model

KEYS = {"tml-ann": "ann", "tml-bob": "bob"}
NAME = "tinker://names/best"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", layers=1)


async def versions(client, output, number=2, owner="anybody"):
    """Paths of different versions, and their digests as the files say them."""
    paths = [
        await (await client.tenant(seed=seed, train_mlp=False)).save(f"v{seed}", "save_weights_for_sampler")
        for seed in range(number)
    ]
    return paths, [
        json.loads((adapter_of(output, path, owner) / "version.json").read_text())["digest"] for path in paths
    ]


async def sampler_of(client, path, number=0):
    asked = {"session_id": client.session, "sampling_session_seq_id": number, "model_path": path}
    return (await client.call("create_sampling_session", **asked))["sampling_session_id"]


async def heard(client, sampler, number):
    ((tokens, _, _),) = samples(await client.sample(sampler, number, PROMPT, max_tokens=8))
    return tokens


async def test_a_name_is_set_back_in_one_call_and_its_sampler_follows(model, tmp_path):
    async with served(model, tmp_path) as (server, _, _):
        client = await server.client()
        (old, new), digests = await versions(client, tmp_path)
        await client.set_name("best", old)
        sampler = await sampler_of(client, NAME)
        assert await sampler_of(client, NAME) == sampler
        for number, (path, digest) in enumerate(zip((old, new, old), (*digests, digests[0]), strict=True)):
            for _ in range(2):  # as a client repeats it that has lost the answer
                assert await client.set_name("best", path) == {"path": NAME, "version": path, "digest": digest}
            assert await heard(client, sampler, number) == said(digest)
        told = (await client.get("names"))["names"]
        history = [{"path": path, "digest": digest} for path, digest in zip((old, new), digests, strict=True)]
        assert told == [{"path": NAME, "versions": [history[0], history[1], history[0]]}]
        assert (await client.get(f"samplers/{sampler}"))["model_path"] == NAME
        listed = {
            each["tinker_path"]: each["user_metadata"] for each in (await client.get("checkpoints"))["checkpoints"]
        }
        assert listed == {path: {"digest": digest} for path, digest in zip((old, new), digests, strict=True)}
    async with served(model, tmp_path) as (server, _, _):
        client = await server.client()
        assert await heard(client, await sampler_of(client, NAME), 0) == said(digests[0])


async def test_every_request_that_comes_after_a_name_is_set_has_its_version(model, tmp_path):
    """A request that is under way keeps the version that it began with, as does one that is repeated."""
    async with served(model, tmp_path) as (server, (engine,), _):
        client = await server.client()
        paths, digests = await versions(client, tmp_path)
        await client.set_name("best", paths[0])
        sampler = await sampler_of(client, NAME)
        engine.goes_on.clear()
        under_way = await client.submit_sample(sampler, 0, PROMPT, max_tokens=8)
        await engine.has_begun(1)
        await client.set_name("best", paths[1])
        after = await client.submit_sample(sampler, 1, PROMPT, max_tokens=8)
        assert await client.submit_sample(sampler, 0, PROMPT, max_tokens=8) == under_way
        engine.goes_on.set()
        for promise, digest in zip((under_way, after), digests, strict=True):
            assert samples(await client.sampled(promise))[0][0] == said(digest)
        meant, number = 1, 1
        for _ in range(20):
            meant = 1 - meant
            await client.set_name("best", paths[meant])
            found = await asyncio.gather(*(heard(client, sampler, number + at) for at in range(1, 4)))
            number += 3
            assert found == [said(digests[meant])] * 3


async def test_a_name_means_only_what_its_owner_has_saved(model, tmp_path):
    async with Server(model, tmp_path, keys=KEYS) as server:
        ann, bob = await server.client("tml-ann"), await server.client("tml-bob")
        (path, other), _ = await versions(ann, tmp_path, owner="ann")
        for name, which, why in (
            ("best", "tinker://none/weights/x", "there are no weights 'tinker://none/weights/x' of this key"),
            ("be$t", path, "'be.t' is no name of weights"),
        ):
            with pytest.raises(Refusal, match=why):
                await ann.set_name(name, which)
        with pytest.raises(Refusal, match="there are no weights .* of this key"):
            await bob.set_name("best", path)
        await ann.set_name("best", path)
        with pytest.raises(Refusal, match="there is no name 'tinker://names/best' of this key"):
            await sampler_of(bob, NAME)
        assert (await bob.get("names"))["names"] == []
        with pytest.raises(Refusal, match=f"{path} is what {NAME} means; set the name to another version before"):
            await ann.delete(path)
        await ann.set_name("best", other)
        await ann.delete(path)
        file = adapter_of(tmp_path, other, "ann") / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        with pytest.raises(Refusal, match="its files have the digest"):
            await ann.set_name("second", other)


async def test_training_goes_on_from_a_name_and_not_from_what_was_saved_over_it(model, tmp_path):
    async with Server(model, tmp_path) as server:
        client = await server.client()
        tenant = await client.tenant()
        path = await tenant.save("state")
        await client.set_name("best", path)
        load = {"path": NAME, "optimizer": True}
        await tenant.train(batches("cross_entropy")[0], **ADAM)
        await client.done("load_weights", **tenant.next(), **load)
        again = await tenant.save("again")
        files = [(adapter_of(tmp_path, each) / "adapter_model.safetensors").read_bytes() for each in (path, again)]
        assert files[0] == files[1]
        await tenant.train(batches("cross_entropy")[0], **ADAM)
        await tenant.save("state", overwrite=True)
        with pytest.raises(Refusal, match=f"{NAME} means {path}, which was saved anew since; set the name again"):
            await client.done("load_weights", **tenant.next(), **load)
