"""Experts that are dealt out over ranks on CPUs compute together what one rank computes with all of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.warm_workers import Fork, WarmWorkers

pytestmark = pytest.mark.vllm


def test_what_ranks_compute_with_their_experts_adds_up(tmp_path: Path, warm: WarmWorkers):
    """With a router that weighs what experts say, and with one that weighs what they are told."""
    printed = tmp_path / "printed"
    with printed.open("w") as output:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = Fork(
            warm, "tests.checkpoint_engine.experts_process", [], env=environment, stdout=output, stderr=output
        )
    assert process.end(printed) == 0, printed.read_text()
    answers = json.loads(printed.read_text().splitlines()[-1])
    assert len(answers) == 2
    for difference, largest in answers:
        assert largest > 0.1
        assert difference < 1e-6
