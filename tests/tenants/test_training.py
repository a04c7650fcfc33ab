"""Tenants train as a plain loop with peft does, whoever else trains meanwhile; versions are exactly what is sampled."""

import copy
import json

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tenants.wire_client import Server, samples
from verl.utils.builtin import make_tiny_model

ADAM = {"learning_rate": 5e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0}
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
PROMPT = [5, 17, 3, 40]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "qwen3, tied": make_tiny_model(folder / "tied", "qwen3", tie_word_embeddings=True),
        "qwen2": make_tiny_model(folder / "untied", "qwen2"),
    }


@pytest.fixture
def model(models, request):
    return models[getattr(request, "param", "qwen3, tied")]


def batches(loss, steps=3, seed=0):
    """Two sequences of different lengths for each step."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(steps):
        data = []
        for length in (7, 12):
            tokens = random.integers(0, 60, length + 1)
            inputs = {"target_tokens": tokens[1:]}
            if loss == "cross_entropy":
                inputs["weights"] = random.random(length, dtype=np.float32)
            else:
                inputs["logprobs"] = (-4 - random.random(length)).astype(np.float32)
                inputs["advantages"] = random.standard_normal(length).astype(np.float32)
            data.append((tokens[:-1], inputs))
        made.append(data)
    return made


def plain_loop(directory, loss, steps, *, seed=0, layers=LAYERS, dtype=torch.float32):
    """The adapted model, the losses and the log-probs of a loop that knows nothing of tenants."""
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=32, target_modules=layers, task_type="CAUSAL_LM"))
    model.train(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=5e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    losses, logprobs = [], []
    for data in steps:
        losses.append(0.0)
        for tokens, inputs in data:
            given = {key: torch.from_numpy(values) for key, values in inputs.items()}
            logits = model(input_ids=torch.from_numpy(tokens)[None]).logits[0].float()
            logp = -torch.nn.functional.cross_entropy(logits, given["target_tokens"], reduction="none")
            if loss == "cross_entropy":
                value = -(given["weights"] * logp).sum()
            else:
                ratio = torch.exp(logp - given["logprobs"])
                surrogate = ratio * given["advantages"]
                if loss == "ppo":
                    surrogate = torch.min(surrogate, torch.clip(ratio, 0.7, 1.1) * given["advantages"])
                value = -surrogate.sum()
            value.backward()
            losses[-1] += value.item()
            logprobs.append(logp.detach().numpy())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adam.step()
        adam.zero_grad()
    return model, losses, logprobs


def adapter_of(output, path, owner="anybody"):
    run, kind, name = path.removeprefix("tinker://").split("/")
    return output / owner / run.replace(":", "_") / kind / name


@pytest.mark.parametrize(
    ("loss", "model", "dtype"),
    [
        ("cross_entropy", "qwen2", torch.float32),
        ("cross_entropy", "qwen3, tied", torch.bfloat16),
        ("importance_sampling", "qwen3, tied", torch.float32),
        ("ppo", "qwen2", torch.float32),
    ],
    indirect=["model"],
)
async def test_a_tenant_trains_as_a_plain_loop_with_peft_does(model, tmp_path, loss, dtype):
    steps = batches(loss)
    options = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1} if loss == "ppo" else {}
    async with Server(model, tmp_path, dtype=dtype) as server:
        tenant = await (await server.client()).tenant(seed=11)
        losses, logprobs = [], []
        for data in steps:
            total, found = await tenant.batch(data, loss, **options)
            losses.append(total)
            logprobs += found
            await tenant.step(**ADAM)
        path = await tenant.save("final")
    wanted, wanted_losses, wanted_logprobs = plain_loop(model, loss, steps, seed=11, dtype=dtype)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    for found, each in zip(logprobs, wanted_logprobs, strict=True):
        np.testing.assert_allclose(found, each, atol=1e-5)
    saved = load_file(adapter_of(tmp_path, path) / "adapter_model.safetensors")
    wanted.save_pretrained(tmp_path / "plain", save_embedding_layers=False)
    plain = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    assert saved.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("train", "layers"),
    [
        ({"train_mlp": False, "train_unembed": False}, LAYERS[:4]),
        ({"train_attn": False, "train_unembed": False}, LAYERS[4:7]),
        ({"train_attn": False, "train_mlp": False}, LAYERS[7:]),
    ],
    ids=["attention", "mlp", "unembedding"],
)
async def test_a_tenant_may_train_some_of_the_layers(model, tmp_path, train, layers):
    steps = batches("cross_entropy")
    async with Server(model, tmp_path) as server:
        tenant = await (await server.client()).tenant(**train)
        losses = [(await tenant.train(data, **ADAM))[0] for data in steps]
    np.testing.assert_allclose(losses, plain_loop(model, "cross_entropy", steps, layers=layers)[1], rtol=1e-5)


async def test_tenants_that_take_turns_are_bit_equal_to_each_one_alone(model, tmp_path):
    async def trained(server, seeds, turns):
        client = await server.client()
        tenants = {seed: await client.tenant(seed=seed, rank=3 + seed) for seed in seeds}
        data = {seed: batches("cross_entropy", seed=seed) for seed in seeds}
        for step in range(3):
            for seed in turns(step):
                await tenants[seed].batch(data[seed][step])
            await tenants[seeds[0]].sampler(step)
            for seed in turns(step):
                await tenants[seed].step(**ADAM)
        return [adapter_of(tmp_path, await tenants[seed].save("final")) for seed in seeds]

    async with Server(model, tmp_path) as server:
        together = await trained(server, [1, 2], lambda step: [1, 2] if step % 2 else [2, 1])
        alone = [*await trained(server, [1], lambda _: [1]), *await trained(server, [2], lambda _: [2])]
    for one, other in zip(together, alone, strict=True):
        for file in ("adapter_model.safetensors", "optimizer.safetensors"):
            assert (one / file).read_bytes() == (other / file).read_bytes()


async def test_a_sampler_stays_with_the_version_that_was_saved(model, tmp_path):
    """Each sampler's log-probs are those of transformers and peft alone, with what was exported."""
    async with Server(model, tmp_path) as server:
        client = await server.client()
        tenant, other = await client.tenant(seed=1), await client.tenant(seed=2)
        found = {}
        base = (
            await client.call(
                "create_sampling_session", session_id=client.session, sampling_session_seq_id=99, base_model="tiny"
            )
        )["sampling_session_id"]
        paths = {base: None}
        for step, data in enumerate(batches("cross_entropy", steps=5)):
            await tenant.train(data, **ADAM)
            await other.train(data, **ADAM)
            sampler = await tenant.sampler(step)
            paths[sampler] = (await client.get(f"samplers/{sampler}"))["model_path"]
            await client.sample(sampler, 0, PROMPT, max_tokens=2)
        await tenant.train(batches("cross_entropy", seed=9)[0], **ADAM)
        for sampler in paths:  # more than are kept as adapters, the oldest one first
            found[sampler] = await client.sample(
                sampler, 1, PROMPT, max_tokens=6, temperature=0.8, seed=4, num_samples=2, prompt_logprobs=True,
                topk_prompt_logprobs=3, topk_sample_logprobs=2,
            )  # fmt: skip
    scored = []
    for sampler, path in paths.items():
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        if path is not None:
            plain = PeftModel.from_pretrained(plain, adapter_of(tmp_path, path))
        prompt = np.frombuffer(found[sampler].prompt_logprobs, "<f4")
        for tokens, logprobs, _ in samples(found[sampler]):
            with torch.no_grad():
                scores = plain(input_ids=torch.tensor([PROMPT + tokens])).logits[0].log_softmax(-1)
            wanted = [scores[index, token].item() for index, token in enumerate((PROMPT + tokens)[1:])]
            np.testing.assert_allclose(logprobs, wanted[3:], atol=1e-5)
            np.testing.assert_allclose(prompt[1:], wanted[:3], atol=1e-5)
        assert np.isnan(prompt[0])
        likeliest, of_samples = found[sampler].topk_prompt_logprobs, found[sampler].sequences[1].topk_sampled_logprobs
        assert (likeliest.length, likeliest.k, of_samples.length, of_samples.k) == (4, 3, 6, 2)
        values, ids = scores.topk(3)
        assert np.frombuffer(likeliest.token_ids, "<i4").reshape(4, 3)[1:].tolist() == ids[:3].tolist()
        got = np.frombuffer(of_samples.logprobs, "<f4").reshape(6, 2)
        np.testing.assert_allclose(got, values[3:9, :2].numpy(), atol=1e-5)
        scored.append(prompt[1:].tolist())
    assert len({tuple(each) for each in scored}) == 6


async def test_greedy_samples_are_those_of_transformers_and_stops_end_them(model, tmp_path):
    async with Server(model, tmp_path) as server:
        client = await server.client()
        asked = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        base = (await client.call("create_sampling_session", **asked))["sampling_session_id"]
        number = iter(range(100))

        async def sampled(**params):
            return samples(await client.sample(base, next(number), PROMPT, **{"max_tokens": 12} | params))

        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        wanted = plain.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=12, eos_token_id=[])
        wanted = wanted[0, 4:].tolist()
        free = {"temperature": 0.0, "stop": []}
        assert [each[0] for each in await sampled(**free, num_samples=2)] == [wanted, wanted]
        assert [each[0] for each in await sampled(top_k=1, stop=[])] == [wanted]
        assert [each[0] for each in await sampled(top_p=1e-6, stop=[])] == [wanted]
        assert (await sampled(**free))[0][2] == 1
        third = wanted.index(wanted[2])
        ((tokens, logprobs, reason),) = await sampled(temperature=0.0, stop=[wanted[2]])
        assert (tokens, len(logprobs), reason) == (wanted[: third + 1], third + 1, 0)
        text = server.base.tokenizer.decode(wanted[4:6])
        ((tokens, _, reason),) = await sampled(temperature=0.0, stop=[text])
        assert text in server.base.tokenizer.decode(tokens)
        assert text not in server.base.tokenizer.decode(tokens[:-1])
        assert reason == 0
        with torch.no_grad():
            drawn = torch.softmax(plain(input_ids=torch.tensor([PROMPT])).logits[0, -1] / 0.7, 0)
        for seed in range(8):  # the whole vocabulary, with the temperature alone
            torch.manual_seed(seed)
            wanted_first = torch.multinomial(drawn[None], 1).item()
            assert (await sampled(seed=seed, temperature=0.7, max_tokens=1))[0][0] == [wanted_first]
        one, again, other = [[each[0] for each in await sampled(seed=seed, num_samples=3)] for seed in (1, 1, 2)]
        assert one == again != other
        last = await client.sample(base, 99, PROMPT, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=2)
        assert np.isnan(np.frombuffer(last.prompt_logprobs, "<f4")).tolist() == [True, True, False, False]


async def test_a_saved_state_goes_on_bit_for_bit_in_another_server(model, tmp_path):
    steps = batches("cross_entropy", steps=4)
    async with Server(model, tmp_path) as server:
        tenant = await (await server.client()).tenant(seed=5)
        for data in steps[:2]:
            await tenant.train(data, **ADAM)
        path = await tenant.save("half")
        for data in steps[2:]:
            await tenant.train(data, **ADAM)
        whole = adapter_of(tmp_path, await tenant.save("whole")) / "adapter_model.safetensors"
        await tenant.client.done("load_weights", **tenant.next(), path=path, optimizer=True)
        for data in steps[2:]:
            await tenant.train(data, **ADAM)
        again = adapter_of(tmp_path, await tenant.save("again")) / "adapter_model.safetensors"
    assert again.read_bytes() == whole.read_bytes()
    async with Server(model, tmp_path) as server:
        client = await server.client()
        found = {}
        for number, optimizer in enumerate((True, False)):
            asked = {"session_id": client.session, "model_seq_id": number, "path": path, "optimizer": optimizer}
            made = await client.done("load_weights", **asked)
            tenant.client, tenant.model_id, tenant.seq_id = client, made["model_id"], 0
            for data in steps[2:]:
                await tenant.train(data, **ADAM)
            found[optimizer] = (
                adapter_of(tmp_path, await tenant.save("end")) / "adapter_model.safetensors"
            ).read_bytes()
    assert found[True] == whole.read_bytes() != found[False]


async def test_gradients_add_up_until_a_step(model, tmp_path):
    first, second = batches("cross_entropy", steps=2)
    async with Server(model, tmp_path) as server:
        client = await server.client()
        parts, whole = await client.tenant(), await client.tenant()
        await parts.batch(first)
        await parts.batch(second, forward_only=True)
        await parts.batch(second)
        await whole.batch(first + second)
        norms = [(await each.step(**ADAM))["metrics"]["grad_norm"] for each in (parts, whole)]
        saved = [adapter_of(tmp_path, await each.save("x")) / "adapter_model.safetensors" for each in (parts, whole)]
    assert norms[0] == norms[1]
    assert saved[0].read_bytes() == saved[1].read_bytes()


async def test_a_version_is_named_by_its_bytes_and_does_not_serve_without_them(model, tmp_path):
    async with Server(model, tmp_path) as server:
        client = await server.client()
        tenant = await client.tenant()
        same = [
            await tenant.save("one", "save_weights_for_sampler"),
            await tenant.save("two", "save_weights_for_sampler"),
        ]
        records = [json.loads((adapter_of(tmp_path, path) / "version.json").read_text()) for path in same]
        assert records[0]["digest"] == records[1]["digest"]
        file = adapter_of(tmp_path, same[1]) / "adapter_model.safetensors"
        changed = copy.copy(bytearray(file.read_bytes()))
        changed[-1] ^= 1
        file.write_bytes(changed)
        samplers = []
        for number, path in enumerate(same):
            asked = {"session_id": client.session, "sampling_session_seq_id": number, "model_path": path}
            samplers.append((await client.call("create_sampling_session", **asked))["sampling_session_id"])
        with pytest.raises(Exception, match="its files have the digest .*, not "):
            await client.sample(samplers[1], 0, PROMPT, max_tokens=1)
        assert samples(await client.sample(samplers[0], 0, PROMPT, max_tokens=1))
