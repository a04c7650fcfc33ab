"""vLLM's HTTP routes for weight updates over workers that only keep what they are told to load, with their ledgers.

Its executor is as vLLM's: every rank answers each call into a queue of its own, and the answers are read in the order
of ranks, up to the first that is an error.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import torch

from tests.http_server import http_server
from verl.checkpoint_engine.engines.vllm.plugin import refusal_to_resume
from verl.checkpoint_engine.errors import ActivationError, CheckpointEngineError
from verl.checkpoint_engine.memory.committed import open_to_activate
from verl.checkpoint_engine.parameter_server.buffers import stored_tensors
from verl.checkpoint_engine.parameter_server.checkpoint_directory import unchanged
from verl.checkpoint_engine.parameter_server.endpoints import ANSWERS
from verl.checkpoint_engine.parameter_server.engine_receiver import IncomingWeights
from verl.checkpoint_engine.parameter_server.writers import Ledger, Writer


class Worker:
    def __init__(self, rank: int, vllm: StandIn) -> None:
        self._vllm, self._rank = vllm, rank
        self.ledger, self.active = Ledger(), False
        self.unread: deque[tuple[bool, Any]] = deque()
        self.weights: dict[str, torch.Tensor] = {}

    @property
    def _is_last(self) -> bool:
        return self._rank == len(self._vllm.workers) - 1

    def do(self, method: str, given: Any) -> None:
        try:
            self.unread.append((True, getattr(self, method)(given)))
        except CheckpointEngineError as exc:
            self.unread.append((False, exc.message))

    def init(self, given: dict[str, Any]) -> None:
        self._vllm.checked.append(given["tensors"])

    def start(self, _: Any) -> None:
        if self.active:
            raise ActivationError("start_weight_update called while a weight update is already active")
        self.active = True

    def update(self, info: dict[str, Any]) -> None:
        if not self.active:
            raise ActivationError("start_weight_update must be called before update_weights.")
        if self._vllm.sleeps_through:
            return
        try:
            self.ledger.require(info.get("writer"))
            self.weights, digest = self._read(info)
            self.ledger.loaded(info["load"], info.get("version"), digest)
        except CheckpointEngineError:
            if self._is_last:
                self.active = False
                raise

    def _read(self, info: dict[str, Any]) -> tuple[dict[str, torch.Tensor], str]:
        """From where the update says, and the digest of a version."""
        if "socket_paths" in info:
            path = list(info["socket_paths"].values())[self._rank]
            self.ledger.begin_load()
            with IncomingWeights(path, "cpu", info["timeout_s"]) as incoming:
                self._vllm.while_loading()
                return {name: tensor.clone() for name, tensor in incoming.tensors()}, ""
        if "files" in info:
            files = unchanged(info["files"])
            self.ledger.begin_load()
            return dict(stored_tensors(files)), ""
        with open_to_activate(self._vllm.misleads or info["arena_path"], info["version"]) as (manifest, slot):
            self.ledger.begin_load()
            self._vllm.while_loading()
            return {name: tensor.clone() for name, tensor in slot.tensors()}, manifest.digest

    def finish(self, _: Any) -> None:
        if not self.active:
            raise ActivationError("finish_weight_update called without a matching start_weight_update.")
        self.active = False

    def answer(self, order: str) -> dict[str, Any]:
        found = self._vllm
        return self.ledger.answer(
            order, rank=self._rank, active=self.active, refuses=found.refuses, copies=found.copies
        )


class StandIn:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.refuses = ""
        self.copies: dict[str, str] = {}
        self.sleeps_through = False
        """An update gets 200 and changes nothing."""
        self.while_loading: Callable[[], object] = lambda: None
        """Called by each worker when it has begun to."""
        self.misleads = ""
        """The arena from which workers load, whatever they are told."""
        self.before: Callable[[str], object] = lambda path: None
        """Called with the path of each request."""
        self.log: list[str] = []
        self.start()

    def start(self) -> None:
        """As a process that is started anew."""
        self.workers: list[Worker] = []
        self.workers += [Worker(rank, self) for rank in range(self.ranks)]
        self.version, self.paused = "default", False
        self.checked: list[Any] = []

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """What all ranks compute with."""
        first, *others = (worker.weights for worker in self.workers)
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in first)
        return first

    @property
    def holders(self) -> set[Writer | None]:
        """Whose it is, as ranks know it."""
        return {worker.ledger.holder for worker in self.workers}

    def rpc(self, method: str, given: Any = None) -> list[Any]:
        at_once = (
            self.ranks if isinstance(given, dict) and "socket_paths" in given else 1
        )  # who feeds them waits for all
        with ThreadPoolExecutor(at_once) as pool:
            wait([pool.submit(worker.do, method, given) for worker in self.workers])
        answers = []
        for worker in self.workers:
            is_good, answer = worker.unread.popleft()
            if not is_good:
                raise ActivationError(f"Worker failed with error '{answer}', please check the stack trace")
            answers.append(answer)
        return answers

    def respond(self, path: str, body: Any) -> Any:
        self.log.append(path)
        self.before(path)
        match path:
            case "/get_world_size":
                return {"world_size": self.ranks}
            case "/weight_info":
                return {"weight_version": self.version}
            case "/pause":
                self.paused = True
            case "/resume":
                if why := refusal_to_resume(self.rpc("answer", json.dumps({"number": "1", "act": "look"}))):
                    raise ActivationError(why)
                self.paused = False
            case "/init_weight_transfer_engine":
                self.rpc("init", body["init_info"])
            case "/start_weight_update":
                self.rpc("start")
            case "/update_weights":
                self.rpc("update", body["update_info"])
            case "/finish_weight_update":
                self.rpc("finish")
                self.version = (body or {}).get("weight_version") or self.version
            case "/collective_rpc":
                assert body["method"] == ANSWERS
                return {"results": self.rpc("answer", *body["args"])}
            case "/reset_prefix_cache":
                pass
            case _:
                return None
        return {}


@contextmanager
def stand_in(ranks: int = 2) -> Iterator[tuple[StandIn, str]]:
    """A server, and its URL."""
    vllm, lock = StandIn(ranks), threading.Lock()

    def answer(_method: str, path: str, body: bytes) -> tuple[int, bytes]:
        status: int
        try:
            with lock:
                found = vllm.respond(urlsplit(path).path, json.loads(body or b"null"))
            status, found = (200, found) if found is not None else (404, {"detail": "Not Found"})
        except CheckpointEngineError as exc:
            status, found = 500, {"error": {"message": exc.message}}
        return status, json.dumps(found).encode()

    with http_server(answer) as url:
        yield vllm, url
