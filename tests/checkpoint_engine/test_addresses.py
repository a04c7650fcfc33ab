"""Under which address a member tells others to reach it."""

from __future__ import annotations

import socket

import pytest

from verl.checkpoint_engine.errors import BackendUnavailable, ConfigError
from verl.checkpoint_engine.links.network import own_address, reached_at

ELSEWHERE = "203.0.113.1"
"""Reserved for documentation: no host has it."""


def test_an_address_of_this_host_is_taken_as_it_is():
    assert reached_at("127.0.0.1", None) == "127.0.0.1"
    assert reached_at("localhost", "lo") == "localhost"


def test_without_one_it_is_that_of_the_interface_or_of_the_default_route():
    assert reached_at(None, "lo") == "127.0.0.1"
    assert reached_at(None, None) == own_address(None)
    socket.inet_aton(own_address(None))


@pytest.mark.parametrize("host", [ELSEWHERE, "no-such-host.invalid"])
def test_an_address_of_another_host_is_refused_with_those_of_this_one(host: str):
    with pytest.raises(ConfigError, match=rf"host={host} is no address of .*; its addresses: .*127\.0\.0\.1 \(lo\)"):
        reached_at(host, None)


def test_an_interface_that_does_not_exist_gets_the_list_of_those_that_do():
    with pytest.raises(BackendUnavailable, match=r"network interface 'ib7' has no IPv4 address on .*; there are: .*lo"):
        reached_at(None, "ib7")
