"""Two hosts on one machine: network namespaces joined by a veth pair. Needs root; nothing outside them is touched."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
_counter = itertools.count()


@dataclass(frozen=True)
class Host:
    """One end of the pair. `enter` makes the calling process live there."""

    namespace: str
    interface: str
    address: str
    names: str
    """File in the form of /etc/hosts."""

    def enter(self) -> None:
        """Before the process has threads, which would stay where they are. Its host name becomes the namespace's."""
        libc = ctypes.CDLL(None, use_errno=True)
        handle = os.open(f"/run/netns/{self.namespace}", os.O_RDONLY)
        try:
            _check(libc.setns(handle, CLONE_NEWNET))
        finally:
            os.close(handle)
        _check(libc.unshare(CLONE_NEWUTS | CLONE_NEWNS))
        socket.sethostname(self.namespace)
        # Libraries look up their interfaces in /sys, which shows those of the namespace in which it was mounted.
        _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
        _check(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))
        # They also look up names of addresses. Without a name server's address they know at once that there is none.
        _check(libc.mount(b"/dev/null", b"/etc/resolv.conf", None, MS_BIND, None))
        _check(libc.mount(self.names.encode(), b"/etc/hosts", None, MS_BIND, None))

    @property
    def received_nbytes(self) -> int:
        """Over the pair."""
        (link,) = json.loads(_ip("-n", self.namespace, "-s", "-j", "link", "show", self.interface))
        return int(link["stats64"]["rx"]["bytes"])


class NotPermitted(Exception):
    """Namespaces cannot be made here; says why."""


@contextlib.contextmanager
def joined_hosts() -> Iterator[tuple[Host, Host]]:
    """Raises NotPermitted. The names carry the process id, so that test runs do not meet."""
    if shutil.which("ip") is None:
        raise NotPermitted("the command ip (iproute2) is not installed")
    stem = f"vs{os.getpid()}-{next(_counter)}"
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix="-hosts"))
        hosts = tuple(
            Host(f"{stem}{end}", f"veth-{end}", f"10.77.0.{number}", names.name) for number, end in ((1, "a"), (2, "b"))
        )
        a, b = hosts
        names.writelines(f"{host.address} {host.namespace}\n" for host in hosts)
        names.write("127.0.0.1 localhost\n")
        names.flush()
        for host in hosts:
            try:
                _ip("netns", "add", host.namespace)
            except subprocess.CalledProcessError as exc:
                raise NotPermitted(f"network namespaces cannot be made: {exc.stderr.strip()}") from exc
            stack.callback(_ip, "netns", "del", host.namespace)
        _ip(
            *("link", "add", a.interface, "netns", a.namespace, "type", "veth"),
            *("peer", "name", b.interface, "netns", b.namespace),
        )
        for host in hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/30", "dev", host.interface)
            for interface in ("lo", host.interface):
                _ip("-n", host.namespace, "link", "set", interface, "up")
            _ip("-n", host.namespace, "route", "add", "default", "dev", host.interface)
        yield a, b


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30).stdout


def _check(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
