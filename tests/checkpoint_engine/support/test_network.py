"""Names of network interfaces."""

import errno
import socket

import pytest

from verl.checkpoint_engine.support.config import ConfigError
from verl.checkpoint_engine.support.network import interface_of, reserve_port


def test_an_interface_is_found_by_its_address():
    assert interface_of("127.0.0.1") == "lo"


def test_an_address_that_no_interface_has_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"has the address 192\.0\.2\.77; there are .*127\.0\.0\.1"):
        interface_of("192.0.2.77")


def test_a_reserved_port_is_given_to_nobody_and_listened_at_by_whoever_is_told_it():
    with reserve_port("127.0.0.1") as reserved, socket.socket() as other, socket.socket() as server:
        address = reserved.getsockname()
        with pytest.raises(OSError, match="in use") as failed:
            other.bind(address)
        assert failed.value.errno == errno.EADDRINUSE
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        with socket.create_connection(address), server.accept()[0] as accepted:
            assert accepted.getsockname() == address
    with socket.socket() as after:
        after.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        after.bind(address)
