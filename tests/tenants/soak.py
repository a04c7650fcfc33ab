"""Tenants of several keys do random things at the same time, while the server is killed and started again.

    python -m tests.tenants.soak --operations 100000 --kills 20 --seed 1

Checked: each answer is bit for bit the one that the tenant gets alone, from a server without faults. A request that is
repeated has one answer. Each version and name whose saving was acknowledged is there after a kill, with its bytes; each
that was not is whole, or not there. A version whose file was changed does not serve. What is of another key is refused.
Adapters in training do not outlive the server: a tenant goes on from its last acknowledged state.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp

from tests import forked
from tests.tenants.test_training import ADAM, PROMPT, adapter_of, batches
from tests.tenants.wire_client import NAME, Client, Refusal, Server, TenantClient, samples
from verl.utils.builtin import make_tiny_model
from verl.utils.builtin.warmup import one_thread

KEYS = {f"tml-{owner}": owner for owner in ("ann", "bob", "cat", "dan")}
TENANTS = 8
LOSSES = ("cross_entropy", "importance_sampling", "ppo")
WEIGHTS = {
    "batch": 6, "step": 5, "sample": 5, "sampler": 2, "save": 2, "load": 1, "delete": 3, "bad": 1, "name": 1,
    "by_name": 2, "meddle": 1, "tamper": 1,
}  # fmt: skip
START_S = 300.0
UNANSWERED = object()
KEPT = 6
"""Versions of a tenant, beyond which it deletes some."""


class Host:
    """The server, in a process that is killed."""

    def __init__(self, model: Path, output: Path, keys: Path) -> None:
        self.output, self.kills = output, 0
        self._flags = ["--model", str(model), "--name", NAME, "--output", str(output), "--keys", str(keys)]
        self._flags += ["--port", "0", "--sampler", "transformers"]

    async def start(self) -> None:
        log = self.output.parent / f"serve-{self.kills}.log"
        self._process, self._pipe = forked.start(_serve, self._flags, log)
        deadline = time.monotonic() + START_S
        while not (log.exists() and (found := re.search(r"at (http://\S+)", log.read_text()))):
            assert self._process.is_alive(), log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            await asyncio.sleep(0.05)
        self.http = aiohttp.ClientSession(found[1])

    async def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        await self.http.close()
        self.kills += 1


def _serve(_: Connection, flags: list[str], log: Path) -> None:
    from verl.checkpoint_engine.support.console import log_to_console
    from verl.tenants.command import main

    with one_thread(), log.open("a", buffering=1) as file:
        sys.stdout = sys.stderr = file
        log_to_console()
        sys.exit(main(flags))


class Tenant:
    """What one does, by its seed, and the log of what was acknowledged: (operation, arguments, answer)."""

    def __init__(self, number: int, seed: int, output: Path, counts: Counter[str]) -> None:
        self.number, self.output, self.counts = number, output, counts
        self.key = list(KEYS)[number % len(KEYS)]
        self.choice = random.Random(f"{seed}:{number}")
        self.log: list[tuple[str, tuple, object]] = []
        self.states: dict[str, str] = {}
        """Path by name, of what was acknowledged; in the order of saving."""
        self.versions: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        """By path."""
        self.meant: str | None = None
        self.setting: str | None = None
        """A name of versions that was being set when the server was killed."""
        self.saved = 0

    async def begin(self, http: aiohttp.ClientSession) -> None:
        """A new session: with the last acknowledged state, or from the beginning."""
        self.client = Client(http, self.key)
        self.client.session = (await self.client.call("create_session", tags=[], sdk_version="0.38.0"))["session_id"]
        self.sampled, self.samplers = 0, {}
        await self.check_saved()
        last = next(reversed(self.states), None)
        self.tenant = await resumed(self.client, self.number, last and self.states[last])
        self.log.append(("begin", (last,), None))

    async def check_saved(self) -> None:
        """What was acknowledged is there; all that is there is whole."""
        listed = (await self.client.get("checkpoints"))["checkpoints"]
        told = {each["tinker_path"]: each["user_metadata"]["digest"] for each in listed}
        for path in (*self.states.values(), *self.versions.values()):
            assert told.get(path) == self.digests[path], f"{path} was acknowledged and is lost"
        for path, digest in told.items():
            if not any(path in tenant.digests for tenant in self.others):
                with contextlib.suppress(FileNotFoundError):  # the other tenant of the key has deleted it
                    assert digest_of(self.output, path, KEYS[self.key]) == digest, f"{path} is not whole"
                    self.counts["unacknowledged versions that are whole"] += 1
        named = {each["path"]: each["versions"][0]["path"] for each in (await self.client.get("names"))["names"]}
        if self.meant is not None:
            allowed = {self.versions.get(self.meant), self.versions.get(self.setting or "")}
            now = named[f"tinker://names/of{self.number}"]
            assert now in allowed, "a name that was set is lost"
            self.meant = next(name for name, path in self.versions.items() if path == now)
        self.setting = None
        self.counts["acknowledged versions looked for after a start"] += len(self.states) + len(self.versions)

    async def once(self) -> None:
        name = self.choice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        await getattr(self, name)()
        self.counts[name] += 1

    async def again(self, call):
        """Sent up to three times, at once or later: one answer."""
        times = self.choice.choice((1, 1, 2, 3))
        promises = await asyncio.gather(*(call() for _ in range(times)))
        assert all(promise == promises[0] for promise in promises)
        found = [await self.client.result(promise) for promise in promises]
        assert all(each == found[0] for each in found)
        self.counts["repeated"] += times - 1
        return found[0]

    async def noted(self, operation, arguments, call):
        """In the log before it is answered: what is refused is refused alone, too."""
        self.log.append((operation, arguments, UNANSWERED))
        try:
            answer = await call()
        except Refusal as refused:
            answer = plain(refused, self.tenant.model_id)
        self.log[-1] = operation, arguments, answer

    async def batch(self):
        loss, seed = self.choice.choice(LOSSES), self.choice.randrange(10**6)
        number, data = self.tenant.next()["seq_id"], of_seed(loss, seed)
        call = partial(self.tenant.submit_batch, data, loss, seq_id=number)
        await self.noted("batch", (loss, seed), partial(self.again, call))

    async def step(self):
        call = partial(self.client.call, "optim_step", **self.tenant.next(), adam_params=ADAM)

        async def step():
            return (await self.again(call))["metrics"]

        await self.noted("step", (), step)

    async def bad(self):
        number = self.tenant.next()["seq_id"]
        call = partial(self.tenant.submit_batch, of_seed("cross_entropy", 0), "dro", seq_id=number)
        await self.noted("bad", (), call)

    async def save(self):
        await self._save("save_weights", self.states, f"s{self.saved}")

    async def sampler(self):
        await self._save("save_weights_for_sampler", self.versions, f"v{self.saved}")

    async def _save(self, call, into, name):
        self.saved += 1
        fields = self.tenant.next() | {"path": name}
        path = (await self.again(lambda: self.client.call(call, **fields)))["path"]
        into[name] = path
        self.digests[path] = digest_of(self.output, path, KEYS[self.key])
        self.log.append((call, (name,), files_of(self.output, path, KEYS[self.key])))

    async def load(self):
        if self.states:
            name, optimizer = self.choice.choice(list(self.states)), self.choice.random() < 0.5
            fields = self.tenant.next() | {"path": self.states[name], "optimizer": optimizer}
            await self.again(lambda: self.client.call("load_weights", **fields))
            self.log.append(("load", (name, optimizer), None))

    async def sample(self):
        if self.versions:
            name = self.choice.choice(list(self.versions))
            await self._sample(name, await self._sampler(self.versions[name]))

    async def by_name(self):
        if self.meant is not None:
            await self._sample(self.meant, await self._sampler(f"tinker://names/of{self.number}"))

    async def _sampler(self, path):
        if path not in self.samplers:
            asked = {"session_id": self.client.session, "sampling_session_seq_id": len(self.samplers)}
            made = await self.client.call("create_sampling_session", **asked, model_path=path)
            self.samplers[path] = made["sampling_session_id"]
        return self.samplers[path]

    async def _sample(self, name, sampler):
        self.sampled += 1
        number, seed = self.sampled, self.choice.randrange(1000)
        found = [await drawn(self.client, sampler, number, seed) for _ in range(self.choice.choice((1, 1, 2)))]
        assert all(each == found[0] for each in found)
        self.log.append(("sample", (name, seed), found[0]))

    async def name(self):
        if self.versions:
            self.setting = self.choice.choice(list(self.versions))
            for _ in range(self.choice.choice((1, 2))):
                await self.client.set_name(f"of{self.number}", self.versions[self.setting])
            self.meant, self.setting = self.setting, None

    async def delete(self):
        for into in (self.states, self.versions):
            old = [name for name in into if name != self.meant][:-1]
            if len(old) >= KEPT:
                path = into.pop(old[0])  # before: a kill leaves it there, or not
                del self.digests[path]
                await self.client.delete(path)

    async def meddle(self):
        """What is another's is refused."""
        other = self.choice.choice([each for each in self.others if each.key != self.key])
        if not hasattr(other, "tenant"):
            return
        theirs = {"model_id": other.tenant.model_id, "seq_id": other.tenant.seq_id + 1}
        asked = [("optim_step", theirs | {"adam_params": ADAM}), ("save_weights", theirs | {"path": "theirs"})]
        asked += [("load_weights", theirs | {"path": p, "optimizer": True}) for p in list(other.states.values())[:1]]
        asked += [("weights_info", {"tinker_path": p}) for p in list(other.versions.values())[:1]]
        for name, fields in asked:
            try:
                await self.client.call(name, **fields)
            except Refusal as refused:
                assert "of this key" in str(refused), refused
                self.counts["refused to others"] += 1
            else:
                raise AssertionError(f"{self.key} did {name} with what is of {other.key}")

    async def tamper(self):
        """A version whose file was changed is refused, or the adapter that is in memory since before answers."""
        if not self.versions:
            return
        name = self.choice.choice(list(self.versions))
        file = adapter_of(self.output, self.versions[name], KEYS[self.key]) / "adapter_model.safetensors"
        whole = file.read_bytes()
        place = self.choice.randrange(1, 200)
        file.write_bytes(whole[:-place] + bytes([whole[-place] ^ 1]) + whole[len(whole) - place + 1 :])
        try:
            await self._sample(name, await self._sampler(self.versions[name]))
        except Refusal as refused:
            assert "its files have the digest" in str(refused), refused
            self.counts["changed files refused"] += 1
        finally:
            file.write_bytes(whole)


def of_seed(loss, seed):
    return batches(loss, steps=1, seed=seed)[0]


def plain(refused, model_id):
    return str(refused).replace(model_id, "").partition("(")[0]


def digest_of(output, path, owner):
    """As the record of a version has it."""
    folder = adapter_of(output, path, owner)
    data = b"".join((folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors"))
    return hashlib.sha256(data).hexdigest()


def files_of(output, path, owner):
    """Digests of the tensors, and of the optimizer's if it has them."""
    files = sorted(adapter_of(output, path, owner).glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


async def resumed(client, number, path):
    if path is None:
        return await client.tenant(seed=number, rank=2 + number % 3)
    asked = {"session_id": client.session, "model_seq_id": 0, "path": path, "optimizer": True}
    return TenantClient(client, (await client.done("load_weights", **asked))["model_id"])


async def drawn(client, sampler, number, seed):
    message = await client.sample(sampler, number, PROMPT, max_tokens=3, num_samples=2, stop=[], seed=seed)
    return [(tokens, logprobs.tobytes()) for tokens, logprobs, _ in samples(message)]


async def disturbed(host: Host, tenants: list[Tenant], operations: int, kills: int, choice: random.Random) -> None:
    """All of them at once; the server is killed at random numbers of operations."""
    at = sorted(choice.sample(range(operations // 20, operations), kills))
    done = 0
    await host.start()
    for end in (*at, operations):

        async def one(tenant: Tenant, end: int = end) -> None:
            nonlocal done
            await tenant.begin(host.http)
            while done < end:  # whoever begins the last one comes here next, while the others are in the midst
                done += 1
                await tenant.once()

        working = [asyncio.create_task(one(tenant)) for tenant in tenants]
        if end == operations:
            await asyncio.gather(*working)
            return
        await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        await host.kill()
        for found in await asyncio.gather(*working, return_exceptions=True):
            if found is not None and not isinstance(found, (aiohttp.ClientError, OSError, RuntimeError)):
                raise found
        print(f"{done} operations, {host.kills} kills", flush=True)
        await host.start()


class Alone:
    """A tenant's log, done again without faults: its methods are the operations, and return the answers."""

    def __init__(self, server: Server, output: Path, number: int) -> None:
        self.server, self.output, self.number = server, output, number
        self.paths: dict[str, str] = {}
        self.client = None

    async def begin(self, name):
        if self.client is not None:
            await self.client.post(f"sessions/{self.client.session}/finish", json={})
        self.client, self.samplers, self.sampled = await self.server.client(), {}, 0
        self.tenant = await resumed(self.client, self.number, name and self.paths[name])

    async def batch(self, loss, seed):
        return await self.client.result(await self.tenant.submit_batch(of_seed(loss, seed), loss))

    async def step(self):
        return (await self.tenant.step(**ADAM))["metrics"]

    async def bad(self):
        await self.tenant.submit_batch(of_seed("cross_entropy", 0), "dro")

    async def save_weights(self, name, call="save_weights"):
        self.paths[name] = await self.tenant.save(name, call)
        return files_of(self.output, self.paths[name], "anybody")

    async def save_weights_for_sampler(self, name):
        return await self.save_weights(name, "save_weights_for_sampler")

    async def load(self, name, optimizer):
        await self.client.done("load_weights", **self.tenant.next(), path=self.paths[name], optimizer=optimizer)

    async def sample(self, name, seed):
        if name not in self.samplers:
            asked = {"session_id": self.client.session, "sampling_session_seq_id": len(self.samplers)}
            made = await self.client.call("create_sampling_session", **asked, model_path=self.paths[name])
            self.samplers[name] = made["sampling_session_id"]
        self.sampled += 1
        return await drawn(self.client, self.samplers[name], self.sampled, seed)


async def check_alone(model: Path, output: Path, tenant: Tenant, counts: Counter[str]) -> None:
    """Each answer of a tenant's log is the one that it gets alone, without faults.

    On as many threads: on two, a few of a hundred log-probs have another last bit than on one.
    """
    with one_thread():
        await _check_alone(model, output, tenant, counts)


async def _check_alone(model: Path, output: Path, tenant: Tenant, counts: Counter[str]) -> None:
    async with Server(model, output) as server:
        alone = Alone(server, output, tenant.number)
        for place, (operation, arguments, wanted) in enumerate(tenant.log):
            if wanted is UNANSWERED:
                continue  # the server was killed: the tenant begins again
            try:
                found = await getattr(alone, operation)(*arguments)
            except Refusal as refused:
                found = plain(refused, alone.tenant.model_id)
            assert found == wanted, f"tenant {tenant.number}, {place}: {operation} {arguments}: {wanted}, alone {found}"
            counts[f"{operation} as alone"] += 1


def soak(folder: Path, operations: int, kills: int, seed: int, checked: int = TENANTS) -> Counter[str]:
    """Runs it, and returns how often what was done. `checked`: tenants that are repeated alone."""
    counts: Counter[str] = Counter()
    model = make_tiny_model(folder / "model", "qwen3", layers=1)
    keys = folder / "keys"
    keys.write_text("".join(f"{owner} {key}\n" for key, owner in KEYS.items()))
    host = Host(model, folder / "out", keys)
    tenants = [Tenant(number, seed, folder / "out", counts) for number in range(TENANTS)]
    for tenant in tenants:
        tenant.others = tenants

    async def run() -> None:
        try:
            await disturbed(host, tenants, operations, kills, random.Random(seed))
            for tenant in tenants:
                await tenant.check_saved()
        finally:
            await host.kill()

    asyncio.run(run())
    counts["kills"] = kills
    print(json.dumps(counts, indent=1), flush=True)
    for tenant in tenants[:checked]:
        asyncio.run(check_alone(model, folder / f"alone-{tenant.number}", tenant, counts))
        print(f"tenant {tenant.number} as alone", flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts = soak(Path(folder), given.operations, given.kills, given.seed)
    print(json.dumps(dict(counts), indent=1), f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
