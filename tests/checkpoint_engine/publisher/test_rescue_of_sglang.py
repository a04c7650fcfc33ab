"""What is done for a server of SGLang whose publisher was killed while it loaded, with a stand-in for its routes."""

from __future__ import annotations

import fcntl
import urllib.error
from email.message import Message
from pathlib import Path
from typing import Any

import msgspec
import pytest

from verl.checkpoint_engine.engines.sglang.orders import Report
from verl.checkpoint_engine.parameter_server.rescuing import rescue_sglang

RANKS = 2
OLD, NEW = Report(version=1, digest="old"), Report(version=2, digest="new")
TORN, STARTED = Report(torn=True), Report()


class SGLang:
    def __init__(self, answers: Path, holds: list[Report], named: str, loads: Report) -> None:
        self.answers, self.holds, self.named, self.loads = answers, holds, named, loads
        self.is_open, self.is_paused, self.is_flushed = True, True, False

    def call(self, path: str, body: Any = None, method: str = "POST") -> Any:
        match path:
            case "/begin_weight_update" if self.is_open:
                raise urllib.error.HTTPError(path, 400, "already open", Message(), None)
            case "/model_info":
                assert method == "GET"
                return {"weight_version": self.named}
            case "/update_weights_from_tensor":
                assert self.is_open
                said = self.holds
                if body["order"] == "load":
                    said = [self.loads] * RANKS
                    self.holds = [msgspec.structs.replace(self.loads, failed="")] * RANKS
                self.named = body.get("weight_version", self.named)
                for rank, report in enumerate(said):
                    (self.answers / f"{rank}.json").write_bytes(msgspec.json.encode(report))
            case "/end_weight_update":
                self.is_open = False
            case "/flush_cache":
                self.is_flushed = True
                return "Cache flushed."
            case "/continue_generation":
                assert self.is_flushed
                assert not self.is_open
                self.is_paused = False
        return {"success": True}


def what(answers: Path) -> dict[str, Any]:
    return {
        "claim": str(answers / "claim"),
        "answers": str(answers / "answers"),
        "ranks": RANKS,
        "version": 2,
        "look": {"order": "look"},
        "load": {"order": "load"},
        "name": {"order": "look", "weight_version": "2"},
    }


@pytest.mark.parametrize(
    ("holds", "named", "loads", "serves"),
    [
        ([OLD, OLD], "1", NEW, "1"),
        ([STARTED, STARTED], "default", NEW, "default"),
        ([NEW, NEW], "2", NEW, "2"),
        ([NEW, NEW], "1", NEW, "2"),
        ([TORN, NEW], "1", NEW, "2"),
        ([TORN, TORN], "1", NEW, "2"),
        ([OLD, NEW], "1", NEW, "2"),
        ([TORN, TORN], "1", Report(torn=True, failed="the arena is gone"), None),
        ([TORN, TORN], "1", msgspec.structs.replace(NEW, unread=["head"]), None),
        ([TORN, TORN], "1", Report(torn=True, unfilled=["head"]), None),
        ([TORN, TORN], "1", OLD, None),
    ],
)
def test_it_serves_what_all_of_its_ranks_hold_under_that_name_or_stays_paused(
    holds: list[Report], named: str, loads: Report, serves: str | None, tmp_path: Path
):
    (tmp_path / "answers").mkdir()
    server = SGLang(tmp_path / "answers", holds, named, loads)
    rescue_sglang(what(tmp_path), "rescue", server.call)
    assert not server.is_open
    assert not (tmp_path / "claim").exists()
    if serves is None:
        assert server.is_paused
    else:
        assert (server.is_paused, server.named) == (False, serves)


def test_one_that_another_has_claimed_is_left_to_that(tmp_path: Path):
    (tmp_path / "answers").mkdir()
    server = SGLang(tmp_path / "answers", [TORN, TORN], "1", NEW)
    with (tmp_path / "claim").open("w") as claim:
        fcntl.flock(claim, fcntl.LOCK_EX)
        rescue_sglang(what(tmp_path), "rescue", server.call)
    assert (server.is_open, server.is_paused, server.holds) == (True, True, [TORN, TORN])
