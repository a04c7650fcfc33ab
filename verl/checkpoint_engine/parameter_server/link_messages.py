"""The protocol of a ParameterServer and an inference engine on their unix socket: messages and frames.

    engine                               server
      Hello                     ->
                                <-       Memory       the memory of offers (file descriptors follow, on CPU)
                                <-       Offer        tensors to load
      Loaded                    ->                    the server may overwrite them
      ...                                ...
                                <-       End          there are no more tensors
      Done                      ->                    the engine has accepted all of them

Both alternate strictly. But the engine may send `Failed` instead of any message, and the server `Abort` at any time.
"""

from __future__ import annotations

import socket
from typing import TypeVar

import msgspec

from ..errors import TransportError
from ..plan.encoded import unpacked
from .records import PackedTensor

PROTOCOL = 2
MAX_FRAME_NBYTES = 2**30
HEADER_NBYTES = 8
PART_NBYTES = 2**20


class Hello(msgspec.Struct, frozen=True, tag=True):
    protocol: int


class Memory(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    kind: str
    """`shared`: file descriptors follow. Otherwise the device type of the IPC `handles`."""
    num_files: int
    handles: tuple[tuple[int | bytes | bool, ...], ...]


class Offer(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    memory: int
    """The index of the file or handle."""
    offset: int
    """The offset in it, from which the tensors' offsets count."""
    tensors: tuple[PackedTensor, ...]


class End(msgspec.Struct, frozen=True, tag=True):
    pass


class Abort(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    pass


class Done(msgspec.Struct, frozen=True, tag=True):
    pass


class Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str


FromServer = Memory | Offer | End | Abort
FromEngine = Hello | Loaded | Done | Failed
T = TypeVar("T")


def address(socket_path: str) -> str:
    """The address for `bind` and `connect`: a leading @ becomes the zero byte of an abstract name (unix(7))."""
    return f"\0{socket_path[1:]}" if socket_path.startswith("@") else socket_path


def send(connection: socket.socket, message: FromServer | FromEngine) -> None:
    """Send one framed message. Raises OSError."""
    body = msgspec.msgpack.encode(message)
    connection.sendall(len(body).to_bytes(HEADER_NBYTES, "little") + body)


def receive_message(connection: socket.socket, kind: type[T]) -> T:
    """Receive a message of `kind`. Raises OSError; TransportError if the peer is gone or sends another message."""
    nbytes = int.from_bytes(_exactly(connection, HEADER_NBYTES), "little")
    if nbytes > MAX_FRAME_NBYTES:
        raise TransportError(f"a message of {nbytes} bytes was announced; is this a socket of another program?")
    body = _exactly(connection, nbytes)
    try:
        return unpacked(body, kind, "a message of this protocol")
    except TransportError as exc:
        raise TransportError(f"a message could not be read: {exc.message}") from exc


def _exactly(connection: socket.socket, nbytes: int) -> bytearray:
    """It takes memory for what has come, not for what is announced."""
    data = bytearray()
    while len(data) < nbytes:
        part = connection.recv(min(nbytes - len(data), PART_NBYTES))
        if not part:
            raise TransportError("the other side has closed the connection or died")
        data += part
    return data
