"""The engine's side of an `EngineLink`: it receives tensors from a ParameterServer."""

from __future__ import annotations

import mmap
import os
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from ..errors import TransportError, TransportTimeout
from . import link_messages as messages
from .records import PackedTensor


def receive(socket_path: str, device: torch.device | str, timeout_s: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, tensor) from the ParameterServer. `IncomingWeights` can also report the engine's errors to it."""
    with IncomingWeights(socket_path, device, timeout_s) as weights:
        yield from weights.tensors()


class FlattenedTensorMetadata(TypedDict):
    """checkpoint-engine's description of one tensor in a buffer, for scripts that use this name."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int


def update_weights_from_ipc(
    zmq_ctx: object,
    zmq_handle: str,
    device_id: int,
    *,
    run: Callable[[list[tuple[str, torch.Tensor]]], None],
    post_hook: Callable[[], None] | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Call `run` with each bucket from a ParameterServer, then `post_hook`. The interface is checkpoint-engine's.

    `zmq_ctx` is ignored: the link is no ZeroMQ socket. `zmq_handle`: the socket path of this engine. `device_id`: the
    index of its accelerator, if any. Tensors are valid as in `IncomingWeights.tensors`. Raises errors of `run` and
    `post_hook`, which the server reports, TransportError, TransportTimeout.
    """
    accelerator = torch.accelerator.current_accelerator()
    device = torch.device(accelerator.type, device_id) if accelerator is not None else torch.device("cpu")
    with IncomingWeights(zmq_handle, device, timeout_s) as weights:
        for bucket in weights.buckets():
            run(bucket)
            bucket.clear()
        if post_hook is not None:
            post_hook()


class IncomingWeights:
    """A connection to a ParameterServer. Use as a context manager, in the process that computes with the weights.

    If the block ends after the last tensor, the server learns that the engine has accepted the weights. If it ends
    earlier, or with an exception, the server gets the reason.
    """

    def __init__(self, socket_path: str, device: torch.device | str, timeout_s: float) -> None:
        """`device`: that of this process. `timeout_s`: for each wait for the server."""
        self._socket_path = socket_path
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        self._connection = socket.socket(socket.AF_UNIX)
        self._fds: list[int] = []
        self._device_memory: list[torch.Tensor] = []
        self._complete = False

    def __enter__(self) -> Self:
        """Connect. Raises TransportError if no server listens at the path, TransportTimeout."""
        self._connection.settimeout(self._timeout_s)
        try:
            self._connection.connect(messages.address(self._socket_path))
            self._open_memory()
        except BaseException as exc:
            self._close()
            if isinstance(exc, OSError):
                raise self._foreign(exc) from exc
            raise
        return self

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor, once. It stays valid while it, or a view of it, is referenced.

        The server overwrites a bucket when the caller requests the next tensor after its last one. On CPU referenced
        tensors are then copied, page by page, because vLLM keeps a tensor until its layer is complete. On devices every
        tensor is a copy already. Raises TransportError, TransportTimeout.
        """
        for offer in self._offers():
            yield from self._load(offer)

    def buckets(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """As `tensors`, in lists of one bucket each. A request for the next one frees the last for the server."""
        for offer in self._offers():
            lent = self._load(offer)
            yield [next(lent) for _ in offer.tensors]
            next(lent, None)

    def _offers(self) -> Iterator[messages.Offer]:
        while True:
            message = self._receive(messages.Offer | messages.End)
            if isinstance(message, messages.End):
                self._complete = True
                return
            yield message
            self._send(messages.Loaded())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None and self._complete:
                self._send(messages.Done())
            else:
                reason = "it stopped before the last tensor"
                if error is not None and not isinstance(error, GeneratorExit):
                    reason = f"{type(error).__name__}: {error}"
                with suppress(TransportError):  # the server is gone, or it failed first: this error is not the news
                    self._send(messages.Failed(f"the engine did not load the weights: {reason}"))
        finally:
            self._close()

    def _open_memory(self) -> None:
        self._send(messages.Hello(messages.PROTOCOL))
        memory = self._receive(messages.Memory)
        if memory.kind == "shared":
            _, self._fds, _, _ = socket.recv_fds(self._connection, 1, memory.num_files)
            if len(self._fds) != memory.num_files:
                raise TransportError(f"the ParameterServer passed {len(self._fds)} of {memory.num_files} files")
        elif memory.kind == self._device.type:
            self._device_memory = [_from_ipc(handle, self._device) for handle in memory.handles]
        else:
            raise TransportError(
                f"the ParameterServer's weights are on {memory.kind}, this engine computes on {self._device.type}"
            )

    def _load(self, offer: messages.Offer) -> Iterator[tuple[str, torch.Tensor]]:
        if self._device_memory:
            memory = self._device_memory[offer.memory][offer.offset :]
            for packed in offer.tensors:
                yield packed.name, _typed(memory[packed.offset : packed.offset + packed.nbytes], packed).clone()
            torch.accelerator.synchronize()  # the copies are complete before the memory is given back
            return
        # A private mapping of its own for each offer: what is written to it is a copy, what is not is the server's.
        start = offer.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        end = offer.offset + max((packed.offset + packed.nbytes for packed in offer.tensors), default=0)
        mapped = mmap.mmap(self._fds[offer.memory], max(end - start, 1), flags=mmap.MAP_PRIVATE, offset=start)
        owners = []
        try:
            for packed in offer.tensors:
                # The tensor and all of its views hold `owner`, which so tells whether any of them is alive.
                at = offer.offset - start + packed.offset
                owner: npt.NDArray[np.uint8] = np.frombuffer(mapped, np.uint8, packed.nbytes, at)
                owners.append(weakref.ref(owner))
                tensor = _typed(torch.from_numpy(owner), packed)
                del owner
                yield packed.name, tensor
                del tensor
        finally:  # also when the engine stops in the middle
            for reference in owners:
                if (held := reference()) is not None:
                    _keep(held)

    def _receive(self, kind: Any) -> Any:
        try:
            message = messages.receive_message(self._connection, kind | messages.Abort)
        except OSError as exc:
            raise self._foreign(exc) from exc
        if isinstance(message, messages.Abort):
            raise TransportError(f"the ParameterServer gave up: {message.reason}")
        return message

    def _send(self, message: messages.FromEngine) -> None:
        try:
            messages.send(self._connection, message)
        except TimeoutError as exc:
            raise self._foreign(exc) from exc
        except OSError as exc:
            # It has closed its end. What it said last, if anything, says why.
            with suppress(OSError):
                abort = messages.receive_message(self._connection, messages.Abort)
                raise TransportError(f"the ParameterServer gave up: {abort.reason}") from exc
            raise self._foreign(exc) from exc

    def _foreign(self, exc: OSError) -> TransportError:
        if isinstance(exc, TimeoutError):
            return TransportTimeout(f"the ParameterServer at {self._socket_path} was silent for {self._timeout_s} s")
        return TransportError(f"no ParameterServer at {self._socket_path}: {exc.strerror}")

    def _close(self) -> None:
        self._connection.close()
        self._device_memory.clear()
        while self._fds:
            os.close(self._fds.pop())


def _typed(part: torch.Tensor, packed: PackedTensor) -> torch.Tensor:
    return part.view(getattr(torch, packed.dtype)).view(packed.shape)


def _keep(owner: npt.NDArray[np.uint8]) -> None:
    """Have the kernel copy the pages of `owner`: every page that is written to."""
    owner[:: mmap.PAGESIZE] |= 0
    owner[-1:] |= 0


def _from_ipc(handle: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    """The first item of torch's handle is the sender's index of the device, which may be another one here."""
    storage: Any = torch.UntypedStorage
    shared = getattr(storage, f"_new_shared_{device.type}")(device.index or 0, *handle[1:])
    return torch.empty(0, dtype=torch.uint8, device=device).set_(shared)
