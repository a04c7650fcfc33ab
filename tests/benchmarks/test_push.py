"""The push benchmark runs against a real server, and its result says everything; how fast it is, is not tested here."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from benchmarks.push import FILES, PUSH, RELOAD, main


@pytest.mark.vllm
@pytest.mark.cells(3)
def test_a_push_is_measured_beside_writing_and_reloading_files_and_its_server_leaves_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with tempfile.TemporaryDirectory() as short:  # sockets are in it
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.setattr(tempfile, "tempdir", short)
        assert main(["--size-mib", "2", "--repeats", "1", "--output", str(tmp_path)]) == 0
        assert os.listdir(short) == []
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ways"].keys() == {PUSH, FILES, RELOAD}
    assert 0 < result["ways"][PUSH]["paused_s"] < result["ways"][PUSH]["seconds"]
    assert "times as long as reload_weights" in capsys.readouterr().out
