import socket
import tempfile

import pytest

from verl.checkpoint_engine.support.config import ConfigError
from verl.checkpoint_engine.support.temporary import directory_for_sockets

NAME = "directory/socket"


@pytest.fixture(params=["a" * 90, "ö"], ids=["long", "not ASCII"])
def unfit(request, monkeypatch, tmp_path):
    directory = tmp_path / request.param
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def test_the_temporary_directory_is_used_if_a_socket_can_be_in_it(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    name = "s" * (107 - len(str(tmp_path)) - 1)
    assert directory_for_sockets(name) == tmp_path
    with socket.socket(socket.AF_UNIX) as longest:
        longest.bind(str(tmp_path / name))
    assert directory_for_sockets(name + "s") != tmp_path


def test_another_takes_the_place_of_one_that_is_unfit(unfit, tmp_path):
    (tmp_path / "other").mkdir()
    assert directory_for_sockets(NAME, [tmp_path / "none", tmp_path / "other"]) == tmp_path / "other"


def test_without_another_the_variable_and_the_room_are_named(unfit, tmp_path):
    with pytest.raises(ConfigError, match=rf"TMPDIR={unfit} has \d+ bytes.* of at most 90 ASCII characters"):
        directory_for_sockets(NAME, [tmp_path / "none"])
