"""The address at which other hosts reach this one, for backends whose library does not choose it."""

from __future__ import annotations

import socket
from contextlib import suppress

import psutil

from ..errors import BackendUnavailable, ConfigError

LOOPBACK = "127.0.0.1"


def reached_at(host: str | None, interface: str | None) -> str:
    """`host`, or `own_address` without one. Raises ConfigError if `host` is no address of this host."""
    if host is None:
        return own_address(interface)
    if not _is_here(host):
        addresses = (f"{address} ({name})" for _, name in socket.if_nameindex() if (address := _address_of(name)))
        raise ConfigError(
            f"host={host} is no address of {socket.gethostname()}; its addresses: {', '.join(addresses)}. "
            "For members on several hosts choose a network interface instead"
        )
    return host


def own_address(interface: str | None) -> str:
    """The IPv4 address of `interface`, else of the default route, else loopback. Raises BackendUnavailable."""
    if interface is None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # sends nothing; the address is reserved for documentation
            except OSError:
                return LOOPBACK  # no route to anywhere: members can only be on this host
            return str(probe.getsockname()[0])
    address = _address_of(interface)
    if address is None:
        present = ", ".join(name for _, name in socket.if_nameindex())
        raise BackendUnavailable(
            f"network interface {interface!r} has no IPv4 address on {socket.gethostname()}; there are: {present}"
        )
    return address


def _address_of(interface: str) -> str | None:
    addresses = psutil.net_if_addrs().get(interface, [])
    return next((one.address for one in addresses if one.family == socket.AF_INET), None)


def _is_here(host: str) -> bool:
    """Whether a server could listen there."""
    try:
        places = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, place in places:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return True
    return False
