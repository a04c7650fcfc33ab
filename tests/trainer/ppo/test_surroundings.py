"""What `--check` sees of the host: places to write, a port."""

import os
import socket

import pytest

from verl.trainer.config.loader import load_config
from verl.trainer.ppo.known_good import known_good
from verl.trainer.ppo.requirements import require_writable
from verl.trainer.ppo.surroundings import taken_ports, unwritable
from verl.utils.config import ConfigError


@pytest.mark.parametrize("directory", ["new/deep", "file/below", "/proc/x", "file"])
def test_a_directory_is_called_unwritable_if_making_it_fails_and_is_not_made(tmp_path, directory):
    (tmp_path / "file").touch()
    path = tmp_path / directory
    config = load_config([f"trainer.default_local_dir={path}"])
    told = list(unwritable(config))
    assert (known_good(config) is None) or not told
    assert path.exists() == (directory == "file")
    try:
        require_writable("trainer.default_local_dir", str(path))
    except ConfigError as exc:
        assert [line.partition(": ")[0] for line in told] == [str(exc).partition(": ")[0]]
    else:
        assert told == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_called_unwritable(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    assert list(unwritable(load_config([f"trainer.default_local_dir={tmp_path / 'closed' / 'x'}"])))


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = load_config([f"trainer.metrics_port={port}"])
        assert [line.partition(" now: ")[0] for line in taken_ports(config)] == [
            f"trainer.metrics_port={port} cannot be served at 127.0.0.1"
        ]
    assert list(taken_ports(config)) == []
