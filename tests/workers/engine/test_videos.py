"""Models that see videos, in FSDP, against transformers: rows with none, one and two, with and without pictures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pictures import HAS_TORCHVISION, with_torchvision
from verl.utils.language_model import WITH_VIDEOS

pytestmark = [
    pytest.mark.job,
    pytest.mark.skipif(not HAS_TORCHVISION, reason="no torchvision: make vision"),
]


@pytest.mark.cells(6)
@pytest.mark.parametrize("family", WITH_VIDEOS)
def test_every_family_computes_and_learns_what_it_does_in_transformers_alone(tmp_path: Path, family: str) -> None:
    """In rows and packed, on one rank and on four, of which one sees nothing and one no video."""
    environment = with_torchvision() | {"VERL_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "tests.workers.engine.video_process", family, str(tmp_path)]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == f"{family} is right in 4 ways"
