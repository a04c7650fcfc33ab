"""docs/architecture.md names ten files in which one sync can be read: they are there, and a sync runs through them."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tests.checkpoint_engine.fakes import Fleet, assert_bit_equal

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "verl" / "checkpoint_engine"
OF_AN_ENGINE = "engines/vllm/receiver.py"


def files_of_the_path() -> list[str]:
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    return [name for _, cell in rows for name in re.findall(r"`([^`]+)`", cell)]


def test_one_sync_is_read_in_ten_files_that_are_there():
    files = files_of_the_path()
    assert len(files) == len(set(files)) == 10
    assert [name for name in files if not (ENGINE / name).is_file()] == []


async def test_a_sync_runs_through_the_files_in_which_it_is_read(tmp_path: Path):
    ran: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            ran.add(frame.f_code.co_filename)

    tensors = {"w": torch.randn(300, 7), "norm": torch.randn(3)}
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        async with Fleet(tensors, tmp_path, backend="tcp") as fleet:
            await fleet.manager.update_weights(1)
            assert_bit_equal(fleet.replicas[0], 1, tensors)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    missed = {name for name in files_of_the_path() if str(ENGINE / name) not in ran}
    assert missed == {OF_AN_ENGINE}
