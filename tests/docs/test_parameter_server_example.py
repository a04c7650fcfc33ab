"""The example of a ParameterServer, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TO_FILES = "3"
"""Of every rank, what it writes on both streams: on one of torchrun's, lines of two ranks get mixed up."""


def test_a_checkpoint_goes_to_all_ranks_and_then_to_one(tmp_path: Path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--redirects", TO_FILES, "--log-dir", str(tmp_path), "examples/parameter_server.py"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    written = {
        (path.parent.name, path.stem): path.read_text() for path in tmp_path.rglob("*.log") if path.parent.name in "01"
    }
    assert done.returncode == 0, (done.stderr, written)
    assert written["0", "stdout"].splitlines() == [
        "rank 0: broadcast, 2 tensors, 1200000 bytes",
        "rank 0: nothing to do, 0 tensors",
    ]
    assert written["1", "stdout"].splitlines() == [
        "rank 1: broadcast, 2 tensors, 1200000 bytes",
        "rank 1: p2p, 2 tensors",
    ]
