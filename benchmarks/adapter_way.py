"""How long an adapter's way to its first sample is: from `save_weights_for_sampler` to a token, for tenants of
`verl-sync serve` on a tiny model.

    python -m benchmarks.adapter_way --tenants 8 --rounds 20

Prints, with tenants one after the other and all at once, median and 95th percentile in milliseconds of saving (until
the client knows the version), of the first token (which loads it), and of both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from verl.tenants.http import API
from verl.tenants.wire import CONTENT_TYPE, FLOAT32, INT64, MESSAGES
from verl.utils.builtin import make_tiny_model

PARTS = ("saved", "first token", "both")
START_S = 300.0
PROMPT = [5, 17, 3, 40]


@contextmanager
def server(directory: Path, *flags: str) -> Iterator[str]:
    """The URL of a server in a process of its own."""
    model = make_tiny_model(directory / "model", "qwen3")
    log = directory / "serve.log"
    command = ["--model", str(model), "--name", "tiny", "--output", str(directory / "out"), "--port", "0", *flags]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "verl.tenants.command", *command], stdout=file, stderr=file, env=os.environ
        )
    try:
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"at (http://\S+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


class Tenant:
    """Trains a little, saves, and samples one token."""

    def __init__(self, http: aiohttp.ClientSession, session: str, number: int, rank: int) -> None:
        self._http, self._session, self._number, self._rank = http, session, number, rank
        self._seq_id = self._samplers = 0

    async def start(self) -> None:
        made = await self._done(
            "create_model",
            session_id=self._session,
            model_seq_id=self._number,
            base_model="tiny",
            lora_config={"rank": self._rank, "seed": self._number},
        )
        self._model = made["model_id"]

    async def round(self) -> tuple[float, float]:
        """Seconds until a new version is saved, and from then until a token of it is there."""
        await self._train()
        begin = time.perf_counter()
        number = self._number * 10**6 + self._samplers
        self._samplers += 1
        saved = await self._done("save_weights_for_sampler", **self._next(), sampling_session_seq_id=number)
        middle = time.perf_counter()
        await self._done(
            "asample",
            sampling_session_id=saved["sampling_session_id"],
            seq_id=0,
            prompt={"chunks": [{"tokens": PROMPT, "type": "encoded_text"}]},
            sampling_params={"max_tokens": 1},
        )
        return middle - begin, time.perf_counter() - middle

    async def _train(self) -> None:
        message = MESSAGES["ForwardBackwardRequest"](**self._next(), loss_fn="cross_entropy")
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(PROMPT, np.int32).tobytes()
        for key, values, dtype in (
            ("target_tokens", np.array([*PROMPT[1:], 7], np.int64), INT64),
            ("weights", np.ones(len(PROMPT), np.float32), FLOAT32),
        ):
            value = datum.loss_fn_inputs.add(key=key).value
            value.dense, value.dtype = values.tobytes(), dtype
            value.shape.extend(values.shape)
        await self._result(
            await self._post(
                "forward_backward", data=message.SerializeToString(), headers={"Content-Type": CONTENT_TYPE}
            )
        )
        await self._done("optim_step", **self._next(), adam_params={"learning_rate": 1e-3})

    def _next(self) -> dict[str, Any]:
        self._seq_id += 1
        return {"model_id": self._model, "seq_id": self._seq_id}

    async def _done(self, name: str, **fields: Any) -> Any:
        return await self._result(await self._post(name, json=fields))

    async def _result(self, promise: dict[str, Any]) -> Any:
        found = await self._post("retrieve_future", json={"request_id": promise["request_id"]})
        if isinstance(found, dict) and "error" in found:
            raise RuntimeError(found["error"])
        return found

    async def _post(self, name: str, **content: Any) -> Any:
        async with self._http.post(API + name, **content) as response:
            response.raise_for_status()
            return await response.read() if response.content_type == CONTENT_TYPE else await response.json()


async def measured(url: str, tenants: int, rounds: int, rank: int) -> dict[str, np.ndarray]:
    """Seconds [rounds x tenants, PARTS] of tenants in turn, and of all at once."""
    async with aiohttp.ClientSession(url) as http:
        async with http.post(f"{API}create_session", json={"tags": []}) as response:
            session = (await response.json())["session_id"]
        made = [Tenant(http, session, number, rank) for number in range(tenants)]
        for tenant in made:
            await tenant.start()
            await tenant.round()
        in_turn = [await tenant.round() for _ in range(rounds) for tenant in made]
        at_once = [each for _ in range(rounds) for each in await asyncio.gather(*(t.round() for t in made))]
    return {
        "one after the other": np.array([(*each, sum(each)) for each in in_turn]),
        "all at once": np.array([(*each, sum(each)) for each in at_once]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sampler", choices=("vllm", "transformers"), default="vllm")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        flags = ["--sampler", given.sampler, "--max-tenants", str(given.tenants), "--max-rank", str(given.rank)]
        with server(Path(directory), *flags, "--kv-cache-gib", "0.1") as url:
            found = asyncio.run(measured(url, given.tenants, given.rounds, given.rank))
    print("| tenants | part | median, ms | p95, ms |\n|---|---|---:|---:|")
    for label, seconds in found.items():
        for part, column in zip(PARTS, seconds.T, strict=True):
            median, p95 = np.percentile(column * 1000, (50, 95))
            print(f"| {label} | {part} | {median:.1f} | {p95:.1f} |")


if __name__ == "__main__":
    main()
