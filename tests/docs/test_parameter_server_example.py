"""The example of a ParameterServer, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_checkpoint_goes_to_all_ranks_and_then_to_one():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "examples/parameter_server.py"],
        cwd=ROOT,
        # Ranks share one stdout: each writes its lines at once, not a line and its end one after the other.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0: broadcast, 2 tensors, 1200000 bytes",
        "rank 0: nothing to do, 0 tensors",
        "rank 1: broadcast, 2 tensors, 1200000 bytes",
        "rank 1: p2p, 2 tensors",
    ]
