"""Under which address this host is reached. For backends whose library does not find out by itself."""

from __future__ import annotations

import fcntl
import socket
import struct

from verl.checkpoint_engine.errors import BackendUnavailable


def own_address(interface: str | None) -> str:
    """The IPv4 address under which other hosts reach this one. Raises BackendUnavailable that lists the interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            if interface is not None:
                request = struct.pack("256s", interface.encode())
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
            probe.connect(("192.0.2.1", 9))  # sends nothing; the address is reserved for documentation
            return str(probe.getsockname()[0])
        except OSError as exc:
            if interface is None:
                return "127.0.0.1"  # no route to anywhere: members can only be on this host
            present = ", ".join(name for _, name in socket.if_nameindex())
            raise BackendUnavailable(
                f"network interface {interface!r} has no IPv4 address on {socket.gethostname()}; there are: {present}"
            ) from exc


SIOCGIFADDR = 0x8915
