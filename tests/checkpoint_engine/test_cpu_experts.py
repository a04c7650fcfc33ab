"""Experts that are dealt out over ranks on CPUs compute together what one rank computes with all of them."""

from __future__ import annotations

import json

import pytest

from tests.warm_workers import WarmWorkers, written_by

pytestmark = pytest.mark.vllm


def test_what_ranks_compute_with_their_experts_adds_up(warm: WarmWorkers):
    """With a router that weighs what experts say, and with one that weighs what they are told."""
    answers = json.loads(written_by(warm, "tests.checkpoint_engine.experts_process").splitlines()[-1])
    assert len(answers) == 2
    for difference, largest in answers:
        assert largest > 0.1
        assert difference < 1e-6


def test_experts_that_vllm_reports_by_the_names_of_0_31_are_missed_only_if_nothing_was_written(warm: WarmWorkers):
    missing = json.loads(written_by(warm, "tests.checkpoint_engine.reported_process").splitlines()[-1])
    assert {case for case, names in missing.items() if names} == {
        "as 0.31 reports it, but nothing was written",
        "not reported",
    }
