"""Whether two runs may write to one directory, and what is left of one that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.trainer.output_lock import NAME, is_written, only_run_in
from verl.utils.config import ConfigError

HOLDER = """
import sys
from pathlib import Path
from verl.trainer.output_lock import only_run_in
with only_run_in(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the directory, until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_told_who_has_the_directory_and_what_to_change(tmp_path: Path, holder: subprocess.Popen[str]):
    with (
        pytest.raises(ConfigError, match=rf"\(process {holder.pid} on .*, since .*\).*trainer.experiment_name"),
        only_run_in(tmp_path),
    ):
        pytest.fail("both have it")


def test_the_directory_of_a_run_that_was_killed_is_free(tmp_path: Path, holder: subprocess.Popen[str]):
    assert is_written(tmp_path)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / NAME).exists()
    assert not is_written(tmp_path)
    with only_run_in(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ended_leaves_nothing(tmp_path: Path, holder: subprocess.Popen[str]):
    holder.communicate("")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_another_run_is_removing_is_not_taken_for_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import fcntl

    lockf, calls = fcntl.lockf, []

    def removed_meanwhile(file, flags):
        lockf(file, flags)
        calls.append(flags)
        if len(calls) == 1:
            (tmp_path / NAME).unlink()

    monkeypatch.setattr(fcntl, "lockf", removed_meanwhile)
    with only_run_in(tmp_path):
        assert len(calls) == 2
        assert (tmp_path / NAME).exists()


def test_a_file_system_without_locks_is_told_and_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    import errno
    import fcntl

    def no_locks(file, flags):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with only_run_in(tmp_path):
        assert "cannot be locked (No locks available)" in caplog.text
