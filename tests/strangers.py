"""Other users of this host, as processes, for tests that run as root."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NOBODY = 65534
HEARS_NOTHING_S = 1.5
"""How long one listens who is to hear nothing."""
PATIENCE_S = 60.0
"""With an answer that is to come."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

# Everything is imported before the user changes, who may not read where Python is.
_TALK = """
import encodings.idna, os, socket, sys
user, patience, words, *places = sys.argv[1:]
os.setuid(int(user))
for place in places:
    host, _, port = place.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=float(patience)) as talk:
            talk.settimeout(float(patience))
            talk.sendall(bytes(int(words)))
            heard = talk.recv(64)
            print(f"heard {len(heard)} bytes" if heard else "shut out", flush=True)
    except TimeoutError:
        print("nothing", flush=True)
    except OSError as exc:
        print("shut out" if isinstance(exc, (ConnectionError,)) else repr(exc), flush=True)
"""


def talk(places: list[tuple[str, int]], user: int, patience_s: float = PATIENCE_S, *, words: int = 64) -> list[str]:
    """What `user` gets for bytes at each of `places`, `words` of them: `heard N bytes`, `shut out`, or `nothing`."""
    command = [
        sys.executable,
        "-c",
        _TALK,
        str(user),
        str(patience_s),
        str(words),
        *(f"{host}:{port}" for host, port in places),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.splitlines()
