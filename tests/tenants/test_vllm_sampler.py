"""vLLM samples with saved adapters as transformers and peft compute with them, many at once, and after its death."""

import asyncio
import json
import os
import re
import signal
import sys
from contextlib import asynccontextmanager, contextmanager

import aiohttp
import numpy as np
import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoint_engine.fakes import soon
from tests.tenants.test_tinker_client import COOKBOOK, check_loops, needs_tinker
from tests.tenants.test_tinker_client import said as written_by_user
from tests.tenants.test_training import ADAM, PROMPT, adapter_of, batches
from tests.tenants.wire_client import NAME, Client, Refusal, samples
from tests.warm_workers import Fork
from verl.utils.builtin import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
SLOTS = 8


class Served:
    """`verl-sync serve` in a process of its own, and a client of it."""

    def __init__(self, process, log, output, model):
        self.process, self.log, self.output, self.model = process, log, output, model
        self.numbers = iter(range(10**6))

    @asynccontextmanager
    async def client(self):
        url = re.search(r"at (http://\S+)", self.log.read_text())[1]
        async with aiohttp.ClientSession(url) as http:
            client = Client(http, "tml-any")
            client.session = (await client.call("create_session", tags=[], sdk_version="0.38.0"))["session_id"]
            yield client
            await client.post(f"sessions/{client.session}/finish", json={})

    def scores(self, path, tokens):
        """Of transformers with the exported adapter: log-probs of the next token [places, vocabulary]."""
        plain = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        if path is not None:
            plain = PeftModel.from_pretrained(plain, adapter_of(self.output, path))
        with torch.no_grad():
            return plain(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)


@contextmanager
def serving(warm, directory, *arguments, family="qwen3"):
    model = make_tiny_model(directory / "model", family, tie_word_embeddings=True)
    log = directory / "serve.log"
    flags = ["--model", model, "--name", NAME, "--output", directory / "out", "--port", "0", *arguments]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    with log.open("wb") as file:
        process = Fork(
            warm, "verl.tenants.command", [*map(str, flags)], env=environment, stdout=file, stderr=file, spawns=True
        )
    try:
        soon(lambda: "serving tiny at" in log.read_text() or process.poll() is not None, 600)
        yield Served(process, log, directory / "out", model)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


@pytest.fixture(scope="module")
def served(warm, tmp_path_factory):
    with serving(
        warm,
        tmp_path_factory.mktemp("served"),
        "--sampler",
        "vllm",
        "--kv-cache-gib",
        "0.1",
        "--max-rank",
        "16",
        "--max-tenants",
        "8",
    ) as found:
        assert found.process.poll() is None, found.log.read_text()
        yield found


async def trained(client, number, *, offset=0, **lora):
    """The paths of as many adapters, which have learned other things."""
    paths = []
    for index in range(number):
        tenant = await client.tenant(seed=offset + index, rank=1 + index % 5, **lora)
        await tenant.train(batches("cross_entropy", seed=offset + index)[0], **ADAM | {"learning_rate": 0.05})
        paths.append(await tenant.save(f"v{index}", "save_weights_for_sampler"))
    return paths


async def sampler_of(client, number, path):
    which = {"base_model": NAME} if path is None else {"model_path": path}
    asked = {"session_id": client.session, "sampling_session_seq_id": number}
    return (await client.call("create_sampling_session", **asked, **which))["sampling_session_id"]


async def test_eight_tenants_at_once_get_what_peft_computes_with_each_adapter(served):
    async with served.client() as client:
        paths = [None, *await trained(client, SLOTS)]
        samplers = [await sampler_of(client, number, path) for number, path in enumerate(paths)]
        asked = {"max_tokens": 12, "temperature": 0.0, "stop": [], "topk_sample_logprobs": 3}
        together = await asyncio.gather(*(client.sample(each, 0, PROMPT, **asked) for each in samplers))
        alone = [await client.sample(each, 1, PROMPT, **asked) for each in samplers]
    heard = set()
    for path, found, again in zip(paths, together, alone, strict=True):
        ((tokens, logprobs, _),) = samples(found)
        scores = served.scores(path, PROMPT + tokens)[len(PROMPT) - 1 : -1]
        assert tokens == scores.argmax(-1).tolist()
        np.testing.assert_allclose(logprobs, scores.max(-1).values, atol=1e-4)
        likeliest = found.sequences[0].topk_sampled_logprobs
        values, ids = scores.topk(3)
        assert np.frombuffer(likeliest.token_ids, "<i4").reshape(12, 3).tolist() == ids.tolist()
        np.testing.assert_allclose(np.frombuffer(likeliest.logprobs, "<f4").reshape(12, 3), values, atol=1e-4)
        ((tokens_alone, logprobs_alone, _),) = samples(again)
        assert tokens_alone == tokens
        np.testing.assert_allclose(logprobs_alone, logprobs, atol=1e-5)
        heard.add((tuple(tokens), round(float(logprobs[0]), 4)))
    assert len(heard) == len(paths)


async def test_more_versions_than_the_engine_holds_take_turns(served):
    async with served.client() as client:
        paths = await trained(client, 6, offset=100) + await trained(client, 2, offset=110)
    async with served.client() as client:
        paths += await trained(client, 4, offset=120)
        assert len(paths) > SLOTS
        samplers = [await sampler_of(client, number, path) for number, path in enumerate(paths)]
        base = await sampler_of(client, 90, None)
        asked = {"max_tokens": 4, "temperature": 0.7, "num_samples": 2, "stop": []}
        found = await asyncio.gather(
            *(client.sample(each, turn, PROMPT, **asked, seed=turn) for turn in range(3) for each in [*samplers, base])
        )
    for path, each in zip([*paths, None] * 3, found, strict=True):
        for tokens, logprobs, _ in samples(each):
            scores = served.scores(path, PROMPT + tokens)
            wanted = [scores[len(PROMPT) - 1 + place, token].item() for place, token in enumerate(tokens)]
            np.testing.assert_allclose(logprobs, wanted, atol=1e-4)


async def test_stops_seeds_and_scores_of_prompts_mean_what_they_mean_with_transformers(served):
    tokenizer = AutoTokenizer.from_pretrained(served.model)
    async with served.client() as client:
        (path,) = await trained(client, 1, offset=30)
        for at, which in enumerate((path, None)):
            sampler = await sampler_of(client, at, which)
            await check_semantics(served, tokenizer, client, sampler, which)


async def check_semantics(served, tokenizer, client, sampler, path):
    async def sampled(**params):
        return await client.sample(sampler, next(served.numbers), PROMPT, **{"max_tokens": 12} | params)

    free = {"temperature": 0.0, "stop": []}
    ((whole, _, reason),) = samples(await sampled(**free))
    assert reason == 1
    assert [each[0] for each in samples(await sampled(**free, num_samples=2))] == [whole, whole]
    assert samples(await sampled(top_k=1, stop=[]))[0][0] == whole
    assert samples(await sampled(top_p=1e-6, stop=[]))[0][0] == whole
    third = whole.index(whole[2])
    ((tokens, logprobs, reason),) = samples(await sampled(temperature=0.0, stop=[whole[2]]))
    assert (tokens, len(logprobs), reason) == (whole[: third + 1], third + 1, 0)
    text = tokenizer.decode(whole[4:6])
    ((tokens, logprobs, reason),) = samples(await sampled(temperature=0.0, stop=[text]))
    assert text in tokenizer.decode(tokens)
    assert text not in tokenizer.decode(tokens[:-1])
    assert (len(logprobs), reason) == (len(tokens), 0)
    one, again, other = [
        [each[0] for each in samples(await sampled(seed=seed, num_samples=3, stop=[]))] for seed in (1, 1, 2)
    ]
    assert one == again != other
    assert one[0] != one[1]
    highest = samples(await sampled(seed=2**63 - 1, num_samples=2, stop=[], max_tokens=2))
    assert len(highest) == 2
    found = await sampled(**free, prompt_logprobs=True, topk_prompt_logprobs=2)
    scores = served.scores(path, PROMPT)
    wanted = [scores[place, token].item() for place, token in enumerate(PROMPT[1:])]
    np.testing.assert_allclose(np.frombuffer(found.prompt_logprobs, "<f4")[1:], wanted, atol=1e-4)
    ids = np.frombuffer(found.topk_prompt_logprobs.token_ids, "<i4").reshape(4, 2)[1:]
    assert ids.tolist() == scores[:-1].topk(2).indices.tolist()
    for temperature in (0.005, 2.5):
        with pytest.raises(Refusal, match=f"temperature={temperature} is not sampled by vLLM: 0, and 0.01 to 2"):
            await sampled(temperature=temperature)


async def test_a_version_that_is_not_what_its_record_says_does_not_serve(served):
    async with served.client() as client:
        paths = await trained(client, 2, offset=60)
        record = adapter_of(served.output, paths[0]) / "version.json"
        content = json.loads(record.read_text())
        content["shape"]["alpha"] //= 2  # which the digest of peft's files does not know
        record.write_text(json.dumps(content))
        wrong, right = [await sampler_of(client, number, path) for number, path in enumerate(paths)]
        for number in range(2):
            with pytest.raises(
                Refusal, match=r"vLLM does not compute with tinker://\S+ as it is saved: .*lora_B.weight"
            ):
                await client.sample(wrong, number, PROMPT, max_tokens=1)
        assert samples(await client.sample(right, 0, PROMPT, max_tokens=1))


async def test_requests_of_a_killed_engine_are_begun_again_and_the_log_says_so(served):
    async with served.client() as client:
        (path,) = await trained(client, 1, offset=80)
        sampler = await sampler_of(client, 0, path)
        asked = {"max_tokens": 400, "temperature": 0.0, "stop": []}
        first = samples(await client.sample(sampler, 0, PROMPT, **asked))
        again = await client.submit_sample(sampler, 1, PROMPT, **asked)
        (core,) = [
            each
            for each in psutil.Process(served.process.pid).children(recursive=True)
            if "EngineCore" in " ".join(each.cmdline())
        ]
        core.send_signal(signal.SIGKILL)
        ((tokens, logprobs, _),) = samples(await client.sampled(again))
        assert tokens == first[0][0]
        np.testing.assert_allclose(logprobs, first[0][1], atol=1e-5)
        assert "the engine died; it is started again, and requests under way are begun again" in served.log.read_text()


@pytest.mark.cells(7)
@needs_tinker
async def test_the_loops_of_the_cookbook_sample_with_vllm(served, tmp_path):
    url = re.search(r"at (http://\S+)", served.log.read_text())[1]
    await written_by_user(COOKBOOK, url, served.model, tmp_path)
    check_loops(tmp_path, served.output, equal=1e-4)


async def test_auto_samples_with_transformers_and_says_why_if_vllm_cannot_with_every_adapter(warm, tmp_path):
    with serving(warm, tmp_path, family="qwen2") as served:
        async with served.client() as client:
            (path,) = await trained(client, 1)
            found = await client.sample(await sampler_of(client, 0, path), 0, PROMPT, max_tokens=4, stop=[])
    ((tokens, logprobs, _),) = samples(found)
    scores = served.scores(path, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    np.testing.assert_allclose(logprobs, scores.gather(1, torch.tensor(tokens)[:, None])[:, 0], atol=1e-5)
    why = "vLLM computes no adapters of the unembedding of Qwen2ForCausalLM"
    assert f"transformers samples, in the thread that trains: --sampler vllm: {why}" in served.log.read_text()


async def test_vllm_samples_with_the_adapters_that_it_can_compute_and_refuses_others_by_name(warm, tmp_path):
    with serving(warm, tmp_path, "--sampler", "vllm", "--kv-cache-gib", "0.1", family="qwen2") as served:
        async with served.client() as client:
            with pytest.raises(Refusal, match="adapters of the unembedding are not sampled: vLLM computes none of lm"):
                await client.tenant()
            (path,) = await trained(client, 1, train_unembed=False)
            asked = {"max_tokens": 4, "temperature": 0.0, "stop": []}
            found = await client.sample(await sampler_of(client, 0, path), 0, PROMPT, **asked)
    ((tokens, logprobs, _),) = samples(found)
    scores = served.scores(path, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    assert tokens == scores.argmax(-1).tolist()
    np.testing.assert_allclose(logprobs, scores.max(-1).values, atol=1e-4)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--max-rank", "600"], "vLLM takes adapters of rank 512 at most, and --max-rank is 600"),
        (["--kv-cache-gib", "0.0001"], r"vLLM refuses its settings: .* \(on cpu: --kv-cache-gib, or less --max-cont"),
    ],
)
async def test_what_vllm_cannot_serve_with_is_told_before_the_server_listens(warm, tmp_path, flags, why):
    with serving(warm, tmp_path, "--sampler", "vllm", *flags) as served:
        assert served.process.poll() == 2
    assert re.search(f"error: --sampler vllm: {why}", served.log.read_text()), served.log.read_text()
