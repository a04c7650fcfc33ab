"""Names and addresses of this host's network interfaces."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from . import envs
from .config import ConfigError


def interface_of(address: str) -> str:
    """The network interface with the IPv4 or IPv6 `address`. Raises ConfigError listing the interfaces."""
    interfaces: dict[str, list[str]] = {
        name: [one.address for one in addresses] for name, addresses in psutil.net_if_addrs().items()
    }
    for name, addresses in interfaces.items():
        if address in addresses:
            return name
    raise ConfigError(
        f"no network interface of {socket.gethostname()} has the address {address}; there are {interfaces}"
    )


def unknown_interfaces() -> dict[str, str]:
    """The variables of gloo and NCCL that name no interface of this host, with what is wrong and what there is.

    Gloo wants each name of a list; NCCL takes the beginning of a name, with `=` the whole, and with `^` all others.
    """
    names = list(psutil.net_if_addrs())
    found: dict[str, str] = {}
    for variable, value in envs.socket_interfaces().items():
        wanted = [one.partition(":")[0] for one in value.lstrip("=^").split(",")]
        if variable.startswith("GLOO"):
            is_known = all(one in names for one in wanted)
        elif value.startswith("="):
            is_known = any(one in names for one in wanted)
        else:
            is_known = value.startswith("^") or any(name.startswith(one) for one in wanted for name in names)
        if not is_known:
            found[variable] = f"{variable}={value} names no interface of {socket.gethostname()}: {', '.join(names)}"
    return found


def reserve_port(host: str = "") -> socket.socket:
    """Reserve a port of the address `host` (empty: all addresses) for a process that binds it later.

    The returned socket is bound, so that no other process gets the port. It does not listen, so that a store or server
    with SO_REUSEADDR can bind it as well. Close the socket after that.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def host_addresses() -> tuple[str, ...]:
    """The IPv4 addresses from which this host may connect to others."""
    found = {
        one.address for addresses in psutil.net_if_addrs().values() for one in addresses if one.family == socket.AF_INET
    }
    return tuple(sorted(address for address in found if not ipaddress.ip_address(address).is_loopback))
