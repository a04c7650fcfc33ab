"""A backend as verl's users write one: rank 0 sends buckets of whole tensors over ZeroMQ to every node."""

from __future__ import annotations

import io
import time
from typing import Any

import torch
import zmq

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

LOG: list[tuple[str, str]] = []
"""(role, method): what was called in this process."""
TIMEOUT_MS = 60_000


@CheckpointEngineRegistry.register("verl-queue")
class QueueEngine(CheckpointEngine):
    def __init__(self, bucket_size: int, is_master: bool = False, topic: str = "weights", wrong: str = "") -> None:
        self.bucket_size, self.is_master, self.topic, self.wrong = bucket_size, is_master, topic, wrong
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket] = []
        self.role = "master" if is_master else "member"

    def _log(self, method: str) -> None:
        LOG.append((self.role, method))

    def prepare(self) -> dict[str, Any]:
        self._log("prepare")
        if not self.is_master:
            return {}
        publisher = self.context.socket(zmq.XPUB)
        publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
        publisher.setsockopt(zmq.SNDHWM, 0)  # a publisher drops what is beyond it
        self.sockets.append(publisher)
        return {"port": publisher.bind_to_random_port("tcp://127.0.0.1")}

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        LOG.append(("driver", f"build_topology {trainer_world_size} {rollout_world_size}"))
        ports = [found["port"] for found in metadata if found]
        assert len(ports) == 1
        return (
            {"rank": [0] + [-1] * (trainer_world_size - 1), "port": ports * trainer_world_size},
            {"rank": list(range(1, rollout_world_size + 1)), "port": ports * rollout_world_size},
        )

    def init_process_group(self, rank: int, port: int) -> None:
        self._log(f"init_process_group {rank}")
        self.rank = rank
        if rank > 0:
            socket = self.context.socket(zmq.SUB)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(f"tcp://127.0.0.1:{port}")
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
            self.sockets.append(socket)

    async def send_weights(self, weights: Any) -> None:
        self._log("send_weights")
        if not self.is_master:
            for _ in weights:
                pass
            return
        (publisher,) = self.sockets
        subscribed, end = 0, time.monotonic() + TIMEOUT_MS / 1000
        while subscribed < self.num_nodes() and time.monotonic() < end:
            subscribed += bool(publisher.poll(100)) and publisher.recv()[0]
        async for name, tensor in weights:
            if self.wrong == "name" and name.endswith("w"):
                name = "another"
            if self.wrong == "shape":
                tensor = tensor.reshape(-1)
            if self.wrong == "raises":
                raise ValueError("out of tokens")
            if self.wrong == "bit" and tensor.numel():
                tensor = tensor.clone()
                tensor.view(-1).view(torch.uint8)[0] ^= 1
            publisher.send(_packed((name, tensor.clone())))
        if self.wrong != "end":
            publisher.send(_packed(None))

    def num_nodes(self) -> int:
        return int(self.topic.partition(":")[2] or 1)

    async def receive_weights(self) -> Any:
        self._log("receive_weights")
        (socket,) = self.sockets
        while (item := torch.load(io.BytesIO(socket.recv()))) is not None:
            yield item
            if self.wrong == "few":
                return

    def finalize(self) -> None:
        self._log("finalize")
        for socket in self.sockets:
            socket.close(0)
        self.sockets.clear()
        self.context.term()


def _packed(item: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(item, buffer)
    return buffer.getvalue()
