"""A client of the protocol that sends each message as it stands in the table of `verl.tenants.wire`.

The client of PyPI is in `test_tinker_client.py`: it takes seconds to import.
"""

from __future__ import annotations

import numpy as np
import torch
from aiohttp.test_utils import TestClient, TestServer

from verl.tenants.base import Base
from verl.tenants.checkpoints import Checkpoints
from verl.tenants.http import API, application
from verl.tenants.names import Names
from verl.tenants.quota import Quota
from verl.tenants.sampler import InProcessSampler
from verl.tenants.service import Service
from verl.tenants.wire import CONTENT_TYPE, FLOAT32, INT64, MESSAGES
from verl.tenants.worker import Worker

NAME = "tiny"


class Refusal(Exception):
    def __init__(self, status, answer, after_s=None):
        super().__init__(answer["error"])
        self.status, self.after_s = status, after_s


class NotYet(Exception):
    pass


class Server:
    """The service over HTTP, with a base model of its own."""

    def __init__(
        self,
        model,
        output,
        *,
        keys=None,
        dtype=torch.float32,
        make_sampler=lambda own, base: own,
        most_beside=None,
        most_versions=None,
        quota=None,
        **options,
    ):
        """`make_sampler`: the sampler, of the one in this process and the base."""
        self.base = Base(model, dtype)
        settings = {"names": [NAME], "max_tenants": 8, "max_rank": 64, "alpha": 32} | options
        worker = Worker(most_beside=most_beside)
        self.sampler = make_sampler(InProcessSampler(self.base, worker), self.base)
        checkpoints = Checkpoints(output, NAME, most=most_versions)
        self.service = Service(
            self.base,
            self.sampler,
            checkpoints,
            Names(output, checkpoints),
            worker,
            quota=quota or Quota(),
            **settings,
        )
        self.http = TestClient(TestServer(application(self.service, keys)))

    async def __aenter__(self):
        await self.http.start_server()
        return self

    async def __aexit__(self, *_):
        await self.http.close()
        self.service.close()

    async def client(self, key="tml-any"):
        client = Client(self.http, key)
        client.session = (await client.call("create_session", tags=[], sdk_version="0.38.0"))["session_id"]
        return client


class Client:
    def __init__(self, http, key):
        self.http, self.key = http, key
        self.models = 0

    async def post(self, name, **content):
        headers = {"X-API-Key": self.key} | ({"Content-Type": CONTENT_TYPE} if "data" in content else {})
        async with self.http.post(API + name, headers=headers, **content) as response:
            if response.status == 408:
                raise NotYet
            if response.status != 200:
                raise Refusal(response.status, await response.json(), response.headers.get("Retry-After"))
            return await response.read() if response.content_type == CONTENT_TYPE else await response.json()

    async def call(self, name, **fields):
        return await self.post(name, json=fields)

    async def get(self, path):
        async with self.http.get(API + path, headers={"X-API-Key": self.key}) as response:
            if response.status != 200:
                raise Refusal(response.status, await response.json())
            return await response.json()

    async def result(self, promise):
        while (found := await self.ready(promise)) is None:
            pass
        if isinstance(found, dict) and "error" in found:
            raise Refusal(200, found)
        return found

    async def delete(self, path):
        run, _, checkpoint = path.removeprefix("tinker://").partition("/")
        where = f"{API}training_runs/{run}/checkpoints/{checkpoint}"
        async with self.http.delete(where, headers={"X-API-Key": self.key}) as response:
            if response.status != 204:
                raise Refusal(response.status, await response.json())

    async def set_name(self, name, path):
        async with self.http.put(
            f"{API}names/{name}", headers={"X-API-Key": self.key}, json={"path": path}
        ) as response:
            if response.status != 200:
                raise Refusal(response.status, await response.json())
            return await response.json()

    async def ready(self, promise):
        """None if the server says that it is not there yet, which it does after some seconds."""
        try:
            return await self.call("retrieve_future", request_id=promise["request_id"])
        except NotYet:
            return None

    async def done(self, name, **fields):
        return await self.result(await self.call(name, **fields))

    async def tenant(self, *, seed=0, rank=4, **lora):
        number, self.models = self.models, self.models + 1
        asked = {"session_id": self.session, "model_seq_id": number, "base_model": NAME}
        made = await self.done("create_model", **asked, lora_config={"rank": rank, "seed": seed, **lora})
        return TenantClient(self, made["model_id"])

    async def submit_sample(self, sampler, number, prompt, **params):
        asked = {key: params.pop(key) for key in list(params) if key in OF_REQUEST}
        return await self.call(
            "asample",
            sampling_session_id=sampler,
            seq_id=number,
            prompt={"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
            sampling_params=params,
            **asked,
        )

    async def sample(self, sampler, number, prompt, **params):
        return await self.sampled(await self.submit_sample(sampler, number, prompt, **params))

    async def sampled(self, promise):
        message = MESSAGES["SampleResponse"]()
        message.ParseFromString(await self.result(promise))
        return message


OF_REQUEST = (
    "num_samples",
    "prompt_logprobs",
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "prompt_logprobs_last_n",
)


class TenantClient:
    def __init__(self, client, model_id):
        self.client, self.model_id, self.seq_id = client, model_id, 0

    def next(self):
        self.seq_id += 1
        return {"model_id": self.model_id, "seq_id": self.seq_id}

    async def submit_batch(self, data, loss="cross_entropy", *, forward_only=False, seq_id=None, **options):
        message = MESSAGES["ForwardBackwardRequest"](
            model_id=self.model_id,
            seq_id=self.next()["seq_id"] if seq_id is None else seq_id,
            loss_fn=loss,
            forward_only=forward_only,
        )
        for key, value in options.items():
            message.loss_fn_config_v2.add(key=key).value.number = value
        for tokens, inputs in data:
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.asarray(tokens, dtype=np.int32).tobytes()
            for key, values in inputs.items():
                named = datum.loss_fn_inputs.add(key=key)
                named.value.dense, named.value.dtype = values.tobytes(), INT64 if values.dtype.kind == "i" else FLOAT32
                named.value.shape.extend(values.shape)
        body = message.SerializeToString()
        return await self.client.post("forward_backward", data=body)

    async def batch(self, data, loss="cross_entropy", **options):
        """The sum of losses, and the log-probs of each datum."""
        message = MESSAGES["ForwardBackwardOutput"]()
        message.ParseFromString(await self.client.result(await self.submit_batch(data, loss, **options)))
        values = message.loss_fn_outputs[0].fields[0].value
        ends = np.frombuffer(values.offsets, "<i8") // 4
        logprobs = np.split(np.frombuffer(values.data, "<f4"), ends[1:-1])
        return message.metrics[0].value, logprobs

    async def step(self, **adam):
        return await self.client.done("optim_step", **self.next(), adam_params=adam)

    async def train(self, data, loss="cross_entropy", **adam):
        found = await self.batch(data, loss)
        await self.step(**adam)
        return found

    async def sampler(self, number=0):
        saved = await self.client.done("save_weights_for_sampler", **self.next(), sampling_session_seq_id=number)
        return saved["sampling_session_id"]

    async def save(self, name, call="save_weights", **fields):
        return (await self.client.done(call, **self.next(), path=name, **fields))["path"]


def samples(message):
    """Tokens, log-probs and the reason of each sequence."""
    return [
        (np.frombuffer(each.tokens, "<i4").tolist(), np.frombuffer(each.logprobs, "<f4"), each.stop_reason)
        for each in message.sequences
    ]
