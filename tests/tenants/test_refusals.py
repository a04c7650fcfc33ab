"""What tenants are refused, in one clear message each; the server goes on, and nobody sees what is another's."""

import asyncio
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.tenants.test_training import ADAM, PROMPT, adapter_of, batches
from tests.tenants.wire_client import NAME, OF_REQUEST, Refusal, Server, samples
from verl.cli.main import main
from verl.tenants.command import read_keys
from verl.utils.builtin import make_tiny_model
from verl.utils.config import ConfigError

TOKENS = np.arange(5)
INPUTS = {"target_tokens": TOKENS + 1, "weights": np.ones(5, np.float32)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def create(**changes):
    return {"session_id": "SESSION", "model_seq_id": 7, "base_model": NAME, "lora_config": {"rank": 4}} | changes


def save(**changes):
    return {"model_id": "MODEL", "seq_id": 50, "path": "x"} | changes


def sample(**changes):
    asked = {key: changes.pop(key) for key in (*OF_REQUEST, "prompt", "prompt_alt_tokens_k") if key in changes}
    whole = {"sampling_session_id": "SAMPLER", "seq_id": 9, "prompt": {"chunks": [{"tokens": PROMPT}]}}
    return whole | {"sampling_params": {"max_tokens": 2} | changes} | asked


REFUSED = [
    ("create_model", create(base_model="other"), 404, "base_model 'other' is not served; 'tiny' is"),
    ("create_model", create(lora_config={"rank": 0}), 400, "lora_config.rank=0 is not from 1 to 64"),
    ("create_model", create(lora_config={"rank": 65}), 400, "lora_config.rank=65 is not from 1 to 64"),
    ("create_model", create(lora_config={"rank": True}), 400, "lora_config.rank is to be of kind int, not True"),
    ("create_model", create(lora_config={"dora": True}), 400, "lora_config: dora=True is not served"),
    (
        "create_model",
        create(lora_config={"train_mlp": False, "train_attn": False, "train_unembed": False}),
        400,
        "lora_config trains nothing",
    ),
    ("create_model", create(optimizer_config={"type": "dimuon"}), 400, "optimizer 'dimuon' is not served, only adamw"),
    ("create_model", create(session_id="session-0"), 404, "there is no session 'session-0' of this key"),
    ("create_model", create(model_seq_id=0), 400, "seq_id 0 of .* came before with other content"),
    ("get_info", {"model_id": "nobody:train:0"}, 404, "there is no model 'nobody:train:0' of this key"),
    ("optim_step", {"model_id": "MODEL", "seq_id": 50}, 400, "optim_step needs adam_params"),
    (
        "optim_step",
        {"model_id": "MODEL", "seq_id": 50, "adam_params": {"beta1": 1.0}},
        400,
        "adam_params.beta1=1.0 is not below 1",
    ),
    (
        "optim_step",
        {"model_id": "MODEL", "seq_id": 50, "adam_params": {"learning_rate": -1}},
        400,
        "adam_params.learning_rate=-1.0 is not from 0.0",
    ),
    (
        "optim_step",
        {"model_id": "MODEL", "seq_id": 50, "adam_params": {"amsgrad": True}},
        400,
        "adam_params: amsgrad=True is not served",
    ),
    (
        "optim_step",
        {"model_id": "MODEL", "seq_id": 50, "optimizer_params": {"type": "dimuon"}},
        400,
        "optimizer_params {'type': 'dimuon'} are not served",
    ),
    ("save_weights", save(path="../x"), 400, "'../x' is no name of weights"),
    ("save_weights", save(path=".hidden"), 400, "'.hidden' is no name of weights"),
    ("save_weights_for_sampler", save(kind="inflight"), 400, "kind=inflight is not served, only snapshot"),
    ("save_weights_for_sampler", save(path=None), 400, "needs either path or sampling_session_seq_id"),
    (
        "load_weights",
        {"session_id": "SESSION", "model_seq_id": 8, "path": "tinker://x/weights/y", "optimizer": True},
        404,
        "there are no weights 'tinker://x/weights/y' of this key",
    ),
    (
        "create_sampling_session",
        {"session_id": "SESSION", "sampling_session_seq_id": 3, "model_path": "tinker://../../etc"},
        404,
        "there are no weights",
    ),
    ("create_sampling_session", {"session_id": "SESSION", "sampling_session_seq_id": 3}, 400, "needs base_model or"),
    ("asample", sample(sampling_session_id="x"), 400, "sampling_params: sampling_session_id='x' is not served"),
    ("asample", sample(prompt={"chunks": [{"tokens": [1, 9999]}]}), 400, "prompt has the id 9999; the model has 0 to"),
    ("asample", sample(prompt={"chunks": [{"type": "image"}]}), 400, "prompt has a chunk of type 'image'"),
    ("asample", sample(prompt={"chunks": []}), 400, "the prompt has 0 tokens; the model takes 1 to 511"),
    ("asample", sample(max_tokens=509), 400, "sampling_params.max_tokens=509 is not from 1 to 508"),
    ("asample", sample(temperature=-1), 400, "sampling_params.temperature=-1.0 is not from 0.0"),
    ("asample", sample(top_p=0), 400, "sampling_params.top_p=0.0 is not from 1e-09 to 1.0"),
    ("asample", sample(stop=[""]), 400, "sampling_params.stop is a string"),
    ("asample", sample(min_p=0.1), 400, "sampling_params: min_p=0.1 is not served"),
    ("asample", sample(num_samples=1000), 400, "asample.num_samples=1000 is not from 1 to 128"),
    ("asample", sample(prompt_alt_tokens_k=2), 400, "asample: prompt_alt_tokens_k=2 is not served"),
    ("asample", sample(prompt_logprobs_last_n=4), 400, "prompt_logprobs_last_n=4 is not from 1 to 3"),
    ("create_custom_loss", {}, 404, "POST /api/v1/create_custom_loss is not served"),
    ("copy_weights", {}, 404, "POST /api/v1/copy_weights is not served"),
    ("retrieve_future", {"request_id": "x"}, 404, "there is no request 'x' of this key"),
    ("forward_backward", {}, 400, "forward_backward takes a body of application/x-protobuf"),
]
BATCHES = {
    "loss_fn 'cispo' is not served; these are: cross_entropy, importance_sampling, ppo": {"loss": "cispo"},
    "loss_fn_config of cross_entropy has no options, not a=1.0": {"a": 1.0},
    "loss_fn_config of ppo has clip_low_threshold, clip_high_threshold, not kl=1.0": {"loss": "ppo", "kl": 1.0},
    "the batch has no data": {"data": []},
    "data[0]: loss_fn_inputs are target_tokens, weights, not target_tokens": {"without": "weights"},
    "data[0]: loss_fn_inputs are target_tokens, weights, not target_tokens, weights, mask": {"mask": INPUTS["weights"]},
    "data[0].weights has shape [4]; one value for each of 5 tokens is asked": {"weights": np.ones(4, np.float32)},
    "data[0].target_tokens has shape [5, 2]; one value": {"target_tokens": np.ones((5, 2), np.int64)},
    "data[0].target_tokens has dtype float32, not int64": {"target_tokens": INPUTS["weights"]},
    "data[0].weights has a value that is not finite": {"weights": np.full(5, np.nan, np.float32)},
    "data[0].target_tokens has the id -1; the model has 0 to": {"target_tokens": TOKENS - 1},
    "data[0].model_input has the id 99995; the model has 0 to": {"tokens": TOKENS + 99995},
    "data[0] has 0 tokens; the model takes 1 to 512": {"tokens": TOKENS[:0]},
    "data[0] has 513 tokens; the model takes 1 to 512": {"tokens": np.ones(513, np.int64)},
}


async def test_what_cannot_be_done_is_refused_in_one_message_and_the_server_goes_on(model, tmp_path):
    async with Server(model, tmp_path) as server:
        client = await server.client()
        tenant = await client.tenant()
        ids = {"SESSION": client.session, "MODEL": tenant.model_id, "SAMPLER": await tenant.sampler()}
        for name, asked, status, message in REFUSED:
            asked = {key: ids.get(value, value) if isinstance(value, str) else value for key, value in asked.items()}
            with pytest.raises(Refusal) as refused:
                await client.done(name, **asked)
            assert refused.value.status == status
            assert re.search(message, str(refused.value)), (message, str(refused.value))
            assert "\n" not in str(refused.value)
        for message, changes in BATCHES.items():
            inputs = {key: changes[key] for key in changes if isinstance(changes[key], np.ndarray) and key != "tokens"}
            inputs = {key: each for key, each in (INPUTS | inputs).items() if key != changes.get("without")}
            options = {key: each for key, each in changes.items() if isinstance(each, float)}
            data = changes.get("data", [(changes.get("tokens", TOKENS), inputs)])
            with pytest.raises(Refusal) as refused:
                await tenant.batch(data, changes.get("loss", "cross_entropy"), **options)
            assert refused.value.status == 400
            assert str(refused.value).startswith(message)
        with pytest.raises(Refusal, match="optim_step is not done: forward_backward .* was refused: loss_fn 'cispo'"):
            await tenant.step(**ADAM)
        await tenant.train([(TOKENS, INPUTS)], **ADAM)
        assert (await client.get("healthz")) == {"status": "ok"}
        told = await client.call("client/config", sdk_version="0.38.0")
        assert told["parallel_fwdbwd_chunks"] is False  # parts of a batch are done in the order of their numbers


async def test_a_step_is_done_with_whole_gradients_only(model, tmp_path):
    async with Server(model, tmp_path) as server:
        tenant = await (await server.client()).tenant()
        with pytest.raises(Refusal, match="optim_step is not done: no forward_backward came before it"):
            await tenant.step(**ADAM)
        steep = {"target_tokens": TOKENS, "logprobs": np.full(5, -1e9, np.float32), "advantages": -INPUTS["weights"]}
        await tenant.batch([(TOKENS, INPUTS)])
        with pytest.raises(Refusal, match=r"the loss of data\[1\] is inf"):
            await tenant.batch([(TOKENS, steep | {"logprobs": np.zeros(5, np.float32)}), (TOKENS, steep)], "ppo")
        with pytest.raises(Refusal, match=r"is not done: forward_backward \(seq_id 3\) failed: the loss of data"):
            await tenant.step(**ADAM)
        saved = [await tenant.save(name, "save_weights_for_sampler") for name in ("a",)]
        await tenant.train([(TOKENS, INPUTS)], **ADAM)
        saved.append(await tenant.save("b", "save_weights_for_sampler"))
        files = [(adapter_of(tmp_path, path) / "adapter_model.safetensors").read_bytes() for path in saved]
        assert files[0] != files[1]


async def test_repeated_requests_are_done_once(model, tmp_path):
    """Each call as a client repeats it that has lost the answer, at once and later."""
    async with Server(model, tmp_path) as server:
        client = await server.client()
        once, twice = await client.tenant(), await client.tenant()
        asked = {"session_id": client.session, "model_seq_id": 1, "base_model": NAME}
        again = await client.done("create_model", **asked, lora_config={"rank": 4, "seed": 0})
        assert again["model_id"] == twice.model_id
        data = batches("cross_entropy", steps=2)
        for step, batch in enumerate(data):
            await once.train(batch, **ADAM)
            number = 2 * step + 1
            promises = await asyncio.gather(*(twice.submit_batch(batch, seq_id=number) for _ in range(3)))
            assert promises[0] == promises[1] == promises[2]
            fields = {"model_id": twice.model_id, "seq_id": number + 1, "adam_params": ADAM}
            first = await client.done("optim_step", **fields)
            assert await client.done("optim_step", **fields) == first
            assert (await twice.submit_batch(batch, seq_id=number)) == promises[0]
        with pytest.raises(Refusal, match="seq_id 3 of .* came before with other content"):
            await twice.submit_batch(data[0], seq_id=3)
        once.seq_id = twice.seq_id = 10
        paths = [await each.save("end") for each in (once, twice)]
        files = [(adapter_of(tmp_path, path) / "optimizer.safetensors").read_bytes() for path in paths]
        assert files[0] == files[1]
        with pytest.raises(Refusal, match=r"seq_id 7 of .* comes after 11; they are to ascend from 1"):
            await twice.submit_batch(data[0], seq_id=7)
        once.seq_id = 10
        assert await once.save("end") == paths[0]
        with pytest.raises(Refusal, match="weights/end of .* is there already; take another name, or overwrite=True"):
            await once.save("end")
        await once.save("end", overwrite=True)
        sampler = await once.sampler()
        found = [samples(await client.sample(sampler, 0, PROMPT, max_tokens=20)) for _ in range(2)]
        assert found[0][0][0] == found[1][0][0]


async def test_a_key_sees_nothing_of_another_one(model, tmp_path):
    async with Server(model, tmp_path, keys={"tml-a": "ann", "tml-b": "bob"}) as server:
        ann, bob = await server.client("tml-a"), await server.client("tml-b")
        tenant = await ann.tenant()
        sampler = await tenant.sampler()
        path = await tenant.save("state")
        promise = await ann.call("asample", **sample(sampling_session_id=None) | {"sampling_session_id": sampler}
                                 | {"sampling_params": {"max_tokens": 1}})  # fmt: skip
        theirs = {
            "create_model": create(session_id=ann.session),
            "session_heartbeat": {"session_id": ann.session},
            "get_info": {"model_id": tenant.model_id},
            "optim_step": {"model_id": tenant.model_id, "seq_id": 9, "adam_params": ADAM},
            "save_weights": {"model_id": tenant.model_id, "seq_id": 9, "path": "mine"},
            "save_weights_for_sampler": {"model_id": tenant.model_id, "seq_id": 9, "path": "mine"},
            "load_weights": {"session_id": bob.session, "model_seq_id": 0, "path": path, "optimizer": False},
            "create_sampling_session": {
                "session_id": bob.session,
                "sampling_session_seq_id": 0,
                "model_path": path,
            },
            "weights_info": {"tinker_path": path},
            "asample": sample() | {"sampling_session_id": sampler, "seq_id": 1},
            "retrieve_future": {"request_id": promise["request_id"]},
        }
        for name, asked in theirs.items():
            with pytest.raises(Refusal, match="of this key") as refused:
                await bob.call(name, **asked)
            assert refused.value.status == 404
        for get in (f"samplers/{sampler}", f"training_runs/{tenant.model_id}"):
            assert await ann.get(get)
            with pytest.raises(Refusal, match="of this key"):
                await bob.get(get)
        with pytest.raises(Refusal, match="of this key"):
            await bob.call(f"sessions/{ann.session}/finish")
        tenant.client = bob
        with pytest.raises(Refusal, match="of this key"):
            await tenant.batch([(TOKENS, INPUTS)])
        with pytest.raises(Refusal, match="the API key is none of this server's --keys") as refused:
            await server.client("tml-c")
        assert refused.value.status == 401
        assert await ann.result(promise)


async def test_adapters_beyond_the_limit_are_refused_until_a_place_is_free(model, tmp_path):
    now = 0.0
    async with Server(model, tmp_path, max_tenants=2, clock=lambda: now) as server:
        first, second = await server.client(), await server.client()
        await first.tenant()
        await second.tenant()
        for client in (first, second):
            with pytest.raises(Refusal, match="2 adapters are in training, which is the limit") as refused:
                await client.tenant()
            assert refused.value.status == 403
        await first.call(f"sessions/{first.session}/finish")
        kept = await second.tenant()
        now += 601
        await second.call("session_heartbeat", session_id=second.session)
        third = await server.client()
        with pytest.raises(Refusal, match="2 adapters are in training"):
            await third.tenant()
        now += 601
        await third.call("session_heartbeat", session_id=third.session)
        await (await third.tenant()).train([(TOKENS, INPUTS)], **ADAM)
        with pytest.raises(Refusal, match="there is no model .* or its session has ended"):
            await kept.batch([(TOKENS, INPUTS)])
        server.service.close()
        assert len(server.base.model.peft_config) == 1


ODD = [None, True, -1, 2**70, 0.5, "", [[]], {}, {"chunks": 1}]
ODD_OF = {
    "prompt": [{"chunks": [{"tokens": tokens}]} for tokens in (None, 1, "ab", [None], ["a"], [2**70], [True], [0.5])],
    "sampling_params": [
        {"max_tokens": 1, name: value} for name in ("stop", "seed", "top_k") for value in (-2, 2**70, [{}], [None], "")
    ],
}


@pytest.mark.job
async def test_no_odd_value_of_any_field_is_an_error_of_the_server(model, tmp_path):
    """Each field of each call, one after the other; what is taken gets an answer that is none either."""
    async with Server(model, tmp_path) as server:
        client = await server.client()
        tenant = await client.tenant()
        sampler, path = await tenant.sampler(), await tenant.save("state")
        right = {
            "create_model": create(session_id=client.session, user_metadata={}, optimizer_config={"type": "adamw"}),
            "optim_step": {"model_id": tenant.model_id, "seq_id": 1, "adam_params": ADAM},
            "save_weights": save(model_id=tenant.model_id, overwrite=True),
            "save_weights_for_sampler": save(model_id=tenant.model_id, kind="snapshot"),
            "load_weights": {"model_id": tenant.model_id, "seq_id": 1, "path": path, "optimizer": True},
            "create_sampling_session": {
                "session_id": client.session,
                "sampling_session_seq_id": 7,
                "base_model": NAME,
                "model_path": path,
            },
            "asample": sample() | {"sampling_session_id": sampler, "num_samples": 1, "prompt_logprobs": True},
            "retrieve_future": {"request_id": "x"},
            "get_info": {"model_id": tenant.model_id},
            "weights_info": {"tinker_path": path},
            "session_heartbeat": {"session_id": client.session},
        }
        numbers = iter(range(100, 10**6))
        for name, fields in right.items():
            for field in fields:
                for odd in ODD + ODD_OF.get(field, []):
                    asked = fields | ({"seq_id": next(numbers)} if "seq_id" in fields else {}) | {field: odd}
                    if name == "create_model":
                        asked = {"model_seq_id": 0} | asked
                    try:
                        promise = await client.call(name, **asked)
                        if "request_id" in promise:
                            await client.result(promise)
                    except Refusal as refused:
                        assert refused.status < 500, (name, field, odd, str(refused))
                        assert "Error: " not in str(refused), (name, field, odd, str(refused))
        for body in (b"", b"{", b"[]", b"3", b"null", b"\xff"):
            for content in ({"json": None, "data": body}, {"data": body}):
                for name in ("create_model", "forward_backward"):
                    with pytest.raises(Refusal) as refused:
                        await client.post(name, **{key: each for key, each in content.items() if each is not None})
                    assert 400 <= refused.value.status < 500


@pytest.mark.parametrize("odd", [["--port", "70000"], ["--max-tenants", "0"], ["--lora-alpha", "x"]])
def test_numbers_of_the_command_line_are_checked(capsys, odd):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model", "absent", *odd])
    assert ended.value.code == 2
    assert f"argument {odd[0]}: {odd[1]!r} is no number from " in capsys.readouterr().err


async def test_a_state_without_an_optimizer_takes_no_place(model, tmp_path):
    async with Server(model, tmp_path, max_tenants=2) as server:
        client = await server.client()
        path = await (await client.tenant()).save("weights", "save_weights_for_sampler")
        for number in range(5, 9):
            asked = {"session_id": client.session, "model_seq_id": number, "path": path}
            with pytest.raises(Refusal, match="has no optimizer state; load the weights alone"):
                await client.call("load_weights", **asked, optimizer=True)
        await client.done("load_weights", **asked, optimizer=False)


async def test_the_last_adapter_may_end_and_the_base_model_goes_on(model, tmp_path):
    async with Server(model, tmp_path) as server:
        found = []
        for _ in range(2):
            client = await server.client()
            tenant = await client.tenant()
            await tenant.train([(TOKENS, INPUTS)], **ADAM)
            await client.call(f"sessions/{client.session}/finish")
            client = await server.client()
            asked = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": NAME}
            base = (await client.call("create_sampling_session", **asked))["sampling_session_id"]
            found.append(samples(await client.sample(base, 0, PROMPT, max_tokens=3, seed=1, stop=[])))
        assert found[0][0][0] == found[1][0][0]
        assert not getattr(server.base.model, "peft_config", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ann\n", "line 1: OWNER KEY is asked"),
        ("\nann sk-1\n", "line 2: OWNER KEY is asked, with a key that begins with tml-"),
        ("../ann tml-1\n", "line 1: OWNER KEY is asked"),
        ("ann tml-1\nbob tml-1\n", "line 2: the key is there already"),
        ("# nobody\n", "has no key"),
    ],
)
def test_a_file_of_keys_is_checked(tmp_path, text, message):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_keys(tmp_path / "keys")


def test_keys_are_read_with_comments(tmp_path):
    (tmp_path / "keys").write_text("ann tml-1  # hers\n\nbob tml-2\nann tml-3\n")
    assert read_keys(tmp_path / "keys") == {"tml-1": "ann", "tml-2": "bob", "tml-3": "ann"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "absent"], "--model='absent' is not a directory"),
        (["--model", "LACKS"], "--model: config.json, with overrides, does not fit the weights: lm_head.weight is not"),
        (["--model", "NO_TOKENIZER"], "has no tokenizer (one of tokenizer.json"),
        (["--model", "MODEL", "--max-context", "99999"], "--max-context 99999: the model takes 512 tokens"),
        (["--model", "MODEL", "--host", "0.0.0.0"], "--host 0.0.0.0: beyond this machine, --keys FILE is needed"),
        (["--model", "MODEL", "--keys", "absent"], "--keys absent: "),
        (["--model", "MODEL", "--host", "192.0.2.1", "--keys", "KEYS"], "--host 192.0.2.1 --port 8000: "),
        (["--model", "MIXTURE"], "Qwen3MoeForCausalLM is not served: adapters are for linear layers of attention, MLP"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_line(model, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("KEYS").write_text("ann tml-1")
    if "MIXTURE" in arguments:
        make_tiny_model("MIXTURE", "qwen3_moe")
    if "LACKS" in arguments:
        file = Path(shutil.copytree(model, "LACKS")) / "model.safetensors"
        save_file({name: tensor for name, tensor in load_file(file).items() if name != "lm_head.weight"}, file)
    if "NO_TOKENIZER" in arguments:
        shutil.copytree(model, "NO_TOKENIZER", ignore=shutil.ignore_patterns("token*"))
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--sampler", "transformers", *(str(model) if each == "MODEL" else each for each in arguments)])
    assert ended.value.code == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("error: ")
    assert message in told
    assert "\n" not in told


async def test_owners_list_and_delete_their_own_versions_alone(model, tmp_path):
    async with Server(model, tmp_path, keys={"tml-ann": "ann", "tml-bob": "bob"}) as server:
        ann, bob = await server.client("tml-ann"), await server.client("tml-bob")
        tenant, other = await ann.tenant(), await bob.tenant()
        paths = [await tenant.save("one"), await tenant.save("two", "save_weights_for_sampler")]
        theirs = await other.save("one")
        listed = await ann.get("checkpoints?limit=1&offset=1")
        assert [each["tinker_path"] for each in listed["checkpoints"]] == paths[:1]
        assert listed["cursor"] == {"offset": 1, "limit": 1, "total_count": 2}
        of_run = (await ann.get(f"training_runs/{tenant.model_id}/checkpoints"))["checkpoints"]
        assert [(each["checkpoint_id"], each["checkpoint_type"]) for each in of_run] == [
            ("sampler_weights/two", "sampler"),
            ("weights/one", "training"),
        ]
        assert (
            of_run[1]["size_bytes"] > (adapter_of(tmp_path, paths[0], "ann") / "optimizer.safetensors").stat().st_size
        )
        assert (await ann.get(f"training_runs/{other.model_id}/checkpoints"))["checkpoints"] == []
        for path in (theirs, "tinker://..%2F..%2Fbob/weights/one", "tinker://*/weights/one"):
            with pytest.raises(Refusal, match="there are no weights .* of this key"):
                await ann.delete(path)
        asked = {"session_id": ann.session, "sampling_session_seq_id": 0, "model_path": paths[1]}
        sampler = (await ann.call("create_sampling_session", **asked))["sampling_session_id"]
        for path in paths:
            await ann.delete(path)
            assert not adapter_of(tmp_path, path, "ann").exists()
        assert (await ann.get("checkpoints"))["checkpoints"] == []
        assert len((await bob.get("checkpoints"))["checkpoints"]) == 1
        with pytest.raises(Refusal, match=r"tinker://\S+/sampler_weights/two was deleted"):
            await ann.sample(sampler, 0, PROMPT, max_tokens=1)
        assert await tenant.save("one") == paths[0]
        with pytest.raises(Refusal, match="limit='x' is no number of checkpoints"):
            await ann.get("checkpoints?limit=x")


async def test_an_owner_saves_so_many_versions_and_goes_on_after_deleting_one(model, tmp_path):
    async with Server(model, tmp_path, most_versions=2) as server:
        tenant = await (await server.client()).tenant()
        first, _ = await tenant.save("one"), await tenant.save("two", "save_weights_for_sampler")
        with pytest.raises(Refusal, match="2 versions of this key are saved, which is the limit; delete some"):
            await tenant.save("three")
        assert await tenant.save("one", overwrite=True) == first
        await tenant.client.delete(first)
        await tenant.save("three")
