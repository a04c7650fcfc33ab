"""Several hosts on one machine: network namespaces on a bridge, each link as slow as wanted.

Needs root and iproute2; nothing outside the namespaces is touched. Used by `benchmarks.hosts` and by tests.
"""

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

from benchmarks.long_links import carrying

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
INTERFACE, BRIDGE = "net0", "bridge0"
MAX_HOSTS = 200
QUEUE = ("burst", "1mb", "latency", "30ms")
"""Of a link with a limit: what may go at once, and how long a packet may wait before it is dropped."""
_counter = itertools.count()


@dataclass(frozen=True)
class Host:
    """`enter` makes the calling process live there."""

    namespace: str
    address: str
    names: str
    """File in the form of /etc/hosts."""
    switch: str
    """Namespace in which all links end."""
    port: str
    """Where its own does."""

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

    def cut_off(self) -> None:
        """From now on every packet from and to it is lost, and nobody is told."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "nomaster")

    def join_again(self) -> None:
        _run("ip", "-n", self.switch, "link", "set", self.port, "master", BRIDGE)

    @property
    def received_nbytes(self) -> int:
        """Over its link, since it was made."""
        return self._counted_nbytes("rx")

    @property
    def sent_nbytes(self) -> int:
        return self._counted_nbytes("tx")

    def _counted_nbytes(self, direction: str) -> int:
        (link,) = json.loads(_run("ip", "-n", self.namespace, "-s", "-j", "link", "show", INTERFACE))
        return int(link["stats64"][direction]["bytes"])


class NotPermitted(OSError):
    """Namespaces cannot be made here; says why."""

    def __init__(self, why: str) -> None:
        super().__init__(f"several hosts cannot be made of this machine: {why}; it takes root and iproute2")


@contextlib.contextmanager
def joined_hosts(
    count: int = 2, *, gbit_per_s: float | None = None, delay_s: float = 0.0, loss: float = 0.0
) -> Iterator[tuple[Host, ...]]:
    """Hosts that reach each other, each over a link that carries `gbit_per_s` in either direction; None: no limit.

    A packet takes `delay_s` from one host to another, and of packets `loss` get lost on the way: see `long_links`.
    Raises NotPermitted. The names carry the process id, so that several of these do not meet.
    """
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise NotPermitted("the commands ip and tc (iproute2) are not installed")
    stem = f"vs{os.getpid()}-{next(_counter)}"
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix="-hosts"))
        hosts = tuple(
            Host(f"{stem}-{number}", f"10.77.0.{number + 1}", names.name, stem, f"port{number}")
            for number in range(count)
        )
        for mapped in ("", "::ffff:"):  # torch asks for the names of the latter, too
            names.writelines(f"{mapped}{host.address} {host.namespace}\n" for host in hosts)
        names.write("127.0.0.1 localhost\n")
        names.flush()
        for namespace in (stem, *(host.namespace for host in hosts)):
            try:
                _run("ip", "netns", "add", namespace)
            except subprocess.CalledProcessError as exc:
                raise NotPermitted(f"network namespaces cannot be made: {exc.stderr.strip()}") from exc
            stack.callback(_run, "ip", "netns", "del", namespace)
        try:
            if delay_s or loss:
                ends = [(host.namespace, INTERFACE, stem, host.port) for host in hosts]
                # Between two hosts are two links.
                stack.enter_context(carrying(ends, delay_s=delay_s / 2, loss=1 - (1 - loss) ** 0.5))
            else:
                for host in hosts:
                    far = ("netns", host.namespace, "type", "veth", "peer", "name", host.port, "netns", stem)
                    _run("ip", "link", "add", INTERFACE, *far)
            _wire(hosts, gbit_per_s)
        except subprocess.CalledProcessError as exc:
            raise NotPermitted(f"{' '.join(exc.cmd)}: {exc.stderr.strip()}") from exc
        except OSError as exc:
            raise NotPermitted(str(exc)) from exc
        yield hosts


def _wire(hosts: tuple[Host, ...], gbit_per_s: float | None) -> None:
    switch = hosts[0].switch
    _run("ip", "-n", switch, "link", "add", "name", BRIDGE, "type", "bridge")
    _run("ip", "-n", switch, "link", "set", BRIDGE, "up")
    for host in hosts:
        own = ("ip", "-n", host.namespace)
        _run("ip", "-n", switch, "link", "set", host.port, "master", BRIDGE, "up")
        _run(*own, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            _run(*own, "link", "set", interface, "up")
        _run(*own, "route", "add", "default", "dev", INTERFACE)
        if gbit_per_s is not None:
            rate = ("rate", f"{round(gbit_per_s * 1000)}mbit")
            for namespace, device in ((host.namespace, INTERFACE), (switch, host.port)):
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *rate, *QUEUE)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def _check(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
