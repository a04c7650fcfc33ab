"""Names of network interfaces."""

import pytest

from verl.checkpoint_engine.support.config import ConfigError
from verl.checkpoint_engine.support.network import interface_of


def test_an_interface_is_found_by_its_address():
    assert interface_of("127.0.0.1") == "lo"


def test_an_address_that_no_interface_has_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"has the address 192\.0\.2\.77; there are .*127\.0\.0\.1"):
        interface_of("192.0.2.77")
