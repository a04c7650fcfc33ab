"""Send weights from one rank of a ParameterServer to the engine process (a vLLM worker) that it feeds.

    link = EngineLink("cpu-0", bucket_nbytes, timeout_s=60)          # then send link.socket_path to the engine
    for bucket in buckets:
        index = ...                                                  # alternate between the halves
        link.await_free(index, timeout_s)
        ...                                                          # write the bucket into link.half(index)
        link.offer(index, tensors)                                   # the engine loads it; the next can be written
    link.finish(timeout_s)
    link.close()

The engine's side is `engine_receiver`, the protocol between them `link_messages`.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from ..errors import ActivationError, CheckpointEngineError, TransportError, TransportTimeout
from ..memory.host_memory import KeptMemory, SharedMemory
from . import link_messages as messages
from .records import PackedTensor

PEER_CREDENTIALS = struct.Struct("iII")
"""Process, user and group of the connected peer: `struct ucred` of unix(7)."""


class EngineLink:
    """A link to one engine, for one update. Used from one thread; another thread of its own talks to the engine.

    Every method except `half`, `abort` and `close` raises the link's first error: ActivationError with the engine's
    text if it refused the weights, TransportError if it died, violates the protocol or was aborted. Halves and socket
    exist until `close`. The socket has an abstract name and no file, so that a killed process leaves none.
    """

    def __init__(
        self,
        device_id: str,
        bucket_nbytes: int,
        *,
        halves: int = 2,
        lent: Sequence[int] = (),
        timeout_s: float,
        device: torch.device | str = "cpu",
        kept: KeptMemory | None = None,
        on_loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """`timeout_s`: for the engine to connect. On a `device` other than cpu the halves are that device's memory.
        `lent`: file descriptors of more memory that the engine may read, on cpu; the caller keeps them open.
        `kept`: on cpu, supplies the halves, and gets them back after the engine has accepted all weights.
        `on_loaded`: called on the link's thread for every offer that the engine has loaded, in order.

        Raises ConfigError without memory for the halves.
        """
        self.device_id = device_id
        self.bucket_nbytes = bucket_nbytes
        self._timeout_s = timeout_s
        self._on_loaded = on_loaded
        self._device = torch.device(device)
        self._kept = kept or KeptMemory()
        self._shared: list[SharedMemory] = []
        """The halves, on cpu."""
        self._halves = self._allocate(halves)
        self._lent = list(lent)
        self.socket_path = f"@verl-engine-link-{os.getpid()}-{secrets.token_hex(8)}"
        """Where the engine connects: see `link_messages.address`. Others than this user and root are turned away."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(messages.address(self.socket_path))
        self._listener.listen()
        self._connection: socket.socket | None = None

        self._changed = threading.Condition()
        self._to_send: deque[messages.Offer | messages.End] = deque()
        self._offered: deque[int] = deque()
        """What the engine has not loaded yet, in order: a half, or what is lent."""
        self._done = False
        self._closed = False
        self._error: CheckpointEngineError | None = None
        self._thread = threading.Thread(target=self._serve, name=f"engine-link-{device_id}", daemon=True)
        self._thread.start()

    def half(self, index: int) -> torch.Tensor:
        """Half `index`: `bucket_nbytes` of uint8. The caller writes it while free; the engine reads it after
        `offer`."""
        return self._halves[index]

    def offer(self, index: int, tensors: Sequence[PackedTensor], offset: int = 0) -> None:
        """Make the engine load `tensors` from half `index`, which must be free. Returns at once.

        Indices after the halves are those of `lent` memory, of which several offers may be open. Offsets of tensors
        count from `offset`. All writes must be complete: on devices the caller synchronises its streams first.
        """
        with self._changed:
            self._raise_error()
            if index < len(self._halves) and index in self._offered:
                raise ValueError(f"half {index} has been offered and is not free yet")
            self._offered.append(index)
            self._to_send.append(messages.Offer(memory=index, offset=offset, tensors=tuple(tensors)))
            self._changed.notify_all()

    def is_free(self, index: int) -> bool:
        """Whether the engine has loaded the last offer in half `index`."""
        with self._changed:
            return index not in self._offered

    def await_free(self, index: int, timeout_s: float) -> None:
        """Wait until the engine has loaded the last offer in half `index`. Also raises TransportTimeout."""
        self._await(lambda: index not in self._offered, timeout_s, "loaded its bucket")

    def await_loaded(self, timeout_s: float) -> None:
        """Wait until the engine has loaded all offers. Also raises TransportTimeout."""
        self._await(lambda: not self._offered, timeout_s, "loaded its bucket")

    def finish(self, timeout_s: float) -> None:
        """Send the end, and wait until the engine has loaded and accepted all weights. Also raises TransportTimeout."""
        with self._changed:
            self._raise_error()
            self._to_send.append(messages.End())
            self._changed.notify_all()
        self._await(lambda: self._done, timeout_s, "accepted the weights")

    def abort(self, reason: str) -> None:
        """Make the engine fail with `reason`. Does nothing after the engine is done or the link has failed."""
        with self._changed:
            if self._error is not None or self._done:
                return
            self._error = TransportError(reason, member=self.device_id)
            self._to_send.clear()
            if self._connection is not None:
                with suppress(OSError):  # it is gone: then there is nobody to tell
                    messages.send(self._connection, messages.Abort(reason))
            self._changed.notify_all()

    def close(self) -> None:
        """Free memory and socket. Idempotent. An engine that is not done fails."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            if self._connection is not None:
                with suppress(OSError):  # the engine was first
                    self._connection.shutdown(socket.SHUT_RDWR)
            else:
                with suppress(OSError), socket.socket(socket.AF_UNIX) as knock:  # the thread waits for somebody
                    knock.connect(messages.address(self.socket_path))
        self._thread.join()
        self._listener.close()
        if self._done:  # else somebody may still write to the halves, or read them
            self._kept.keep(self._shared)
        self._shared.clear()
        self._halves.clear()

    def __enter__(self) -> EngineLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _allocate(self, halves: int) -> list[torch.Tensor]:
        if self._device.type != "cpu":
            return [torch.empty(self.bucket_nbytes, dtype=torch.uint8, device=self._device) for _ in range(halves)]
        self._shared = self._kept.take(self.bucket_nbytes, halves)
        return [piece.memory for piece in self._shared]

    def _await(self, reached: Callable[[], bool], timeout_s: float, what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: reached() or self._error is not None, timeout_s)
            self._raise_error()
            if not reached():
                state = "has not connected" if self._connection is None else f"has not {what}"
                raise TransportTimeout(f"the engine {state} within {timeout_s} s", member=self.device_id)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------------ the thread

    def _serve(self) -> None:
        try:
            with self._accept() as connection:
                with self._changed:
                    self._connection = connection
                    if self._closed:
                        return
                self._converse(connection)
        except TimeoutError:
            self._fail(TransportTimeout(f"the engine has not connected within {self._timeout_s} s"))
        except OSError as exc:
            self._fail(TransportError(f"the engine died or closed its connection: {exc.strerror}"))
        except CheckpointEngineError as exc:
            self._fail(exc)

    def _accept(self) -> socket.socket:
        end_s = time.monotonic() + self._timeout_s
        while True:
            self._listener.settimeout(max(1e-3, end_s - time.monotonic()))  # 0 would mean not to wait at all
            connection, _ = self._listener.accept()
            if _user_of(connection) in (os.geteuid(), 0):
                connection.settimeout(None)  # deadlines are those of the callers, who close the link when one passes
                return connection
            connection.close()

    def _converse(self, connection: socket.socket) -> None:
        hello = self._receive(connection, messages.Hello)
        if hello is None:
            return
        if hello.protocol != messages.PROTOCOL:
            raise TransportError(f"the engine speaks protocol {hello.protocol}, not {messages.PROTOCOL}")
        self._send_memory(connection)
        while (message := self._next_message()) is not None:
            messages.send(connection, message)
            if isinstance(message, messages.End):
                self._receive(connection, messages.Done)
                with self._changed:
                    self._done = self._error is None
                    self._changed.notify_all()
                return
            if self._receive(connection, messages.Loaded) is None:
                return
            self._on_loaded()
            with self._changed:
                self._offered.popleft()
                self._changed.notify_all()

    def _receive(self, connection: socket.socket, kind: type[messages.T]) -> messages.T | None:
        """The engine's next message, or None if it failed, which is noted."""
        message: messages.T | messages.Failed = messages.receive_message(connection, kind | messages.Failed)  # type: ignore[arg-type]
        if isinstance(message, messages.Failed):
            self._fail(ActivationError(message.reason))
            return None
        return message

    def _send_memory(self, connection: socket.socket) -> None:
        if self._device.type == "cpu":
            files = [*(piece.fd for piece in self._shared), *self._lent]
            messages.send(connection, messages.Memory(kind="shared", num_files=len(files), handles=()))
            socket.send_fds(connection, [b"\0"], files)
        else:
            handles = tuple(_ipc_handle(half) for half in self._halves)
            messages.send(connection, messages.Memory(kind=self._device.type, num_files=0, handles=handles))

    def _next_message(self) -> messages.Offer | messages.End | None:
        """What to send next; None when there will be nothing more."""
        with self._changed:
            self._changed.wait_for(lambda: self._to_send or self._closed or self._error is not None)
            return self._to_send.popleft() if self._to_send and not self._closed else None

    def _fail(self, error: CheckpointEngineError) -> None:
        with self._changed:
            if self._error is None and not self._done:
                error.member = error.member or self.device_id
                self._error = error
            self._changed.notify_all()


def _user_of(connection: socket.socket) -> int:
    """The user id of the process that connected, as the kernel noted it then."""
    noted = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    _, user, _ = PEER_CREDENTIALS.unpack(noted)
    return int(user)


def _ipc_handle(memory: torch.Tensor) -> tuple[int | bytes | bool, ...]:
    """What another process needs to map device memory: torch's own handle, of integers and bytes."""
    share = getattr(memory.untyped_storage(), f"_share_{memory.device.type}_")
    handle: tuple[int | bytes | bool, ...] = tuple(share())
    return handle
