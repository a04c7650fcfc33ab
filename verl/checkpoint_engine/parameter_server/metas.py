"""The file with which another job finds a checkpoint in host memory. It has no pickles.

It is a line of text, `verl-sync parameter server metas, format 1, 5678 bytes`, then as many bytes of msgpack.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..errors import ConfigError
from ..plan.encoded import unpacked
from ..support.files import read_regular, write_private
from .records import RankMetas

FORMAT = 1
_TITLE = b"verl-sync parameter server metas"
_HEADER = re.compile(re.escape(_TITLE) + rb", format (\d{1,9}), (\d{1,18}) bytes\n")
_MAX_HEADER_NBYTES = 128


class _Content(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    metas: tuple[RankMetas, ...]


def save_metas(path: str | Path, name: str, metas: Mapping[int, RankMetas]) -> None:
    """Write the ranks' records of checkpoint `name`; replaces the file atomically. Raises ConfigError."""
    if Path(path).exists() and not Path(path).is_file():
        raise ConfigError(f"metas cannot be written to {path}: it is no file")
    content = msgspec.msgpack.encode(_Content(name=name, metas=tuple(metas.values())))
    fresh = Path(f"{path}.{os.getpid()}.new")
    try:
        write_private(fresh, b"%s, format %d, %d bytes\n%s" % (_TITLE, FORMAT, len(content), content))
        fresh.rename(path)
    except OSError as exc:
        fresh.unlink(missing_ok=True)
        raise ConfigError(f"metas cannot be written to {path}: {exc.strerror}") from exc


def load_metas(path: str | Path) -> tuple[str, dict[int, RankMetas]]:
    """Read a file of `save_metas`: the checkpoint's name, and the records by rank.

    Raises ConfigError with the cause: unreadable, another kind of file, truncated, of a newer format.
    """
    try:
        data = read_regular(Path(path))
    except (OSError, ValueError) as exc:  # no file; a name with a NUL
        raise ConfigError(f"metas cannot be read from {path}: {getattr(exc, 'strerror', None) or exc}") from exc
    header = _HEADER.match(data[:_MAX_HEADER_NBYTES])
    if header is None:
        if data[: len(_TITLE)] == _TITLE[: len(data)]:
            raise ConfigError(f"{path} is truncated: {len(data)} bytes, not even its first line")
        raise ConfigError(f"{path} is not a file of metas: it does not begin with {_TITLE.decode()!r}")
    form, nbytes = map(int, header.groups())
    if form != FORMAT:
        raise ConfigError(f"{path} has format {form}; this version of verl-sync reads format {FORMAT}")
    content = data[header.end() :]
    if len(content) != nbytes:
        what = "is truncated" if len(content) < nbytes else "has bytes after its end"
        raise ConfigError(f"{path} {what}: {len(content)} bytes of content, not {nbytes}")
    try:
        decoded = unpacked(content, _Content, "what save_metas writes", ConfigError)
    except ConfigError as exc:
        raise ConfigError(f"{path} is damaged: {exc.message}") from exc
    return decoded.name, {meta.rank: meta for meta in decoded.metas}
