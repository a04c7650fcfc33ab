"""Records in files to which they are appended: a line of JSON, and as many bytes as that says. Each has a digest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import xxhash

_LINE_NBYTES = 1 << 16


def framed(head: Mapping[str, Any], payload: bytes = b"") -> bytes:
    """A record. `head` is plain values of JSON, without `nbytes` and `digest`."""
    head = {**head, "nbytes": len(payload)}
    return json.dumps({**head, "digest": _digest(head, payload)}).encode() + b"\n" + payload


def frames(file: IO[bytes], *, verify: bool = True) -> Iterator[tuple[dict[str, Any], bytes, int]]:
    """Head, content and end of each record up to the first one that is not whole. Without `verify`, damaged content is
    skipped, and a head may be anything that is a dict."""
    size = os.fstat(file.fileno()).st_size
    while line := file.readline(_LINE_NBYTES):
        try:
            head = dict(json.loads(line))
            digest, nbytes = str(head.pop("digest")), int(head["nbytes"])
        except (ValueError, KeyError, TypeError):
            return
        end = file.tell() + nbytes
        if nbytes < 0 or end > size:
            return
        payload = file.read(nbytes) if verify else b""
        if verify and _digest(head, payload) != digest:
            return
        file.seek(end)
        yield head, payload, end


def cut_to_whole(path: Path) -> None:
    """Cut off what is behind the last whole record: the last writer may have died in the middle of one."""
    whole = 0
    with path.open("rb") as file:
        for *_, end in frames(file):
            whole = end
    os.truncate(path, whole)


def append(path: Path, record: bytes, first: Mapping[str, Any], payload: bytes = b"") -> None:
    """Append to a file of this user alone (0600), in a directory of this user alone. `first` and `payload` are the
    first record of a new file. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        if file.tell() == 0:
            file.write(framed(first, payload))
        file.write(record)


def _digest(head: Mapping[str, Any], payload: bytes) -> str:
    digest = xxhash.xxh3_128(json.dumps(head, sort_keys=True).encode())
    digest.update(payload)
    return digest.hexdigest()
