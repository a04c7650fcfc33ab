"""An authenticated connection between a publisher and a rollout node on another host, for calls and answers.

    publisher                    node
    nonce                  -->
                           <--   nonce, proof that it has the key
    proof                  -->
    frame, frame, ...     <-->   frame, frame, ...

A frame is its length, a tag and a message. Tags are keyed by both nonces and count frames, so a forged, repeated or
missing frame ends the connection. Frames are not encrypted: the network can read names and sizes of tensors.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, get_type_hints

import msgspec

from ..config import CheckpointEngineConfig
from ..errors import CheckpointEngineError, TransportError, error_named
from ..plan.encoded import unpacked
from ..sync.members import NodePort, methods_of
from .reports import METHODS_BY_CALL, Reports

NONCE_NBYTES: Final = 32
PROOF_NBYTES: Final = 32
LENGTH = struct.Struct("<Q")
MOST_NBYTES = 2**30
"""The most bytes of a message. The plan of a model with a million pieces has some ten megabytes."""
HANDSHAKE_S = 10.0
SILENT_S = 10
"""Keep-alive idle time in seconds; the loss of a peer's host is noticed after about twice this."""
OPEN = "open"
"""The first call: make a node with an index and a configuration, for a job."""


class Call(msgspec.Struct, frozen=True, tag=True):
    number: int
    method: str
    arguments: msgspec.Raw


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The caller of that call does not wait for its answer any more."""

    number: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    number: int
    value: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, tag=True):
    number: int
    kind: str
    """The name of a class in `errors`."""
    message: str
    version: int | None
    phase: str | None
    member: str | None

    @classmethod
    def of(cls, number: int, error: BaseException) -> Failure:
        if isinstance(error, CheckpointEngineError):
            kind = type(error).__name__
            return cls(number, kind, error.message, error.version, error.phase, error.member)
        return cls(number, TransportError.__name__, f"{type(error).__name__}: {error}", None, None, None)

    def error(self) -> CheckpointEngineError:
        kind = error_named(self.kind)
        return kind(self.message, version=self.version, phase=self.phase, member=self.member)


Message = Call | Cancel | Answer | Failure


class Signature:
    """The types of arguments and result of a method of `NodePort`."""

    def __init__(self, arguments: Sequence[Any], returned: Any) -> None:
        self.arguments: Any = tuple.__class_getitem__(tuple(arguments))
        self.returned = returned


def _signature_of(method: Callable[..., Any]) -> Signature:
    hints = get_type_hints(method)
    returned = hints.pop("return")
    return Signature(list(hints.values()), returned)


METHODS: dict[str, Signature] = {
    OPEN: Signature([int, CheckpointEngineConfig, str], type(None)),
    **{call: _signature_of(getattr(Reports, name)) for call, name in METHODS_BY_CALL.items()},
    **{name: _signature_of(getattr(NodePort, name)) for name in sorted(methods_of(NodePort))},
}
"""The methods that a publisher may call, by name."""


class Link:
    """One end of the connection. One task receives frames; any task may send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: bytes, own: bytes) -> None:
        self._reader, self._writer, self._session = reader, writer, session
        self._own, self._other = own, NODE if own == PUBLISHER else PUBLISHER
        self._sent = self._received = 0
        self._sending = asyncio.Lock()

    async def send(self, message: Message) -> None:
        """Send one frame. Raises OSError."""
        payload = msgspec.msgpack.encode(message)
        async with self._sending:
            tag = _tag(self._session, self._own, self._sent, payload)
            self._sent += 1
            self._writer.write(LENGTH.pack(len(payload)) + tag)
            self._writer.write(payload)
            await self._writer.drain()

    async def receive(self) -> Message:
        """Receive one frame. Raises OSError or EOFError if the peer is gone, TransportError for a forged frame."""
        (nbytes,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if nbytes > MOST_NBYTES:
            raise TransportError(f"a message of {nbytes} bytes")
        tag = await self._reader.readexactly(PROOF_NBYTES)
        payload = await self._reader.readexactly(nbytes)
        if not hmac.compare_digest(tag, _tag(self._session, self._other, self._received, payload)):
            raise TransportError("a message without the other end's signature")
        self._received += 1
        return unpacked(payload, Message, "a message")  # type: ignore[arg-type]

    def close(self) -> None:
        self._writer.close()


PUBLISHER, NODE = b"publisher", b"node"


async def ask_in(host: str, port: int, key: bytes) -> Link:
    """Connect as the publisher. Raises OSError, EOFError; TransportError if the node has another key."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        _keep_alive(writer)
        nonce = secrets.token_bytes(NONCE_NBYTES)
        writer.write(nonce)
        other = await reader.readexactly(NONCE_NBYTES)
        _require_proof(await reader.readexactly(PROOF_NBYTES), key, NODE, nonce, other)
        writer.write(_proof(key, PUBLISHER, nonce, other))
        return Link(reader, writer, _proof(key, b"session", nonce, other), PUBLISHER)
    except BaseException:
        writer.close()
        raise


async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> Link:
    """Accept a publisher as the node. Raises as `ask_in`."""
    _keep_alive(writer)
    other = await reader.readexactly(NONCE_NBYTES)
    nonce = secrets.token_bytes(NONCE_NBYTES)
    writer.write(nonce + _proof(key, NODE, other, nonce))
    _require_proof(await reader.readexactly(PROOF_NBYTES), key, PUBLISHER, other, nonce)
    return Link(reader, writer, _proof(key, b"session", other, nonce), NODE)


def _require_proof(proof: bytes, key: bytes, who: bytes, publishers: bytes, nodes: bytes) -> None:
    if not hmac.compare_digest(proof, _proof(key, who, publishers, nodes)):
        raise TransportError("it has another key")


def _proof(key: bytes, who: bytes, publishers: bytes, nodes: bytes) -> bytes:
    return hmac.digest(key, who + publishers + nodes, "sha256")


def _tag(session: bytes, sender: bytes, number: int, payload: bytes) -> bytes:
    counted = number.to_bytes(16, "little")
    return hashlib.blake2b(payload, digest_size=PROOF_NBYTES, key=session, salt=counted, person=sender).digest()


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """A host that is gone does not close its connections."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_S // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2 * SILENT_S * 1000)
