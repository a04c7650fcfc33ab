"""Which sequence of a step is kept for `verl-sync mismatch`."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl.protocol import DataProto
from verl.trainer.config.loader import load_config
from verl.trainer.config.validate import problems_of
from verl.trainer.ppo.mismatch_probe import MismatchProbe

ROWS, PROMPT, RESPONSE = 4, 3, 4


@pytest.fixture
def batch():
    """Row 2 has a tool's answer, whose log-probs mean nothing, and row 1 the largest difference."""
    generated = torch.ones(ROWS, RESPONSE, dtype=torch.long)
    generated[0, 3] = 0  # padding
    generated[2, 1] = 0
    attention = torch.ones(ROWS, PROMPT + RESPONSE, dtype=torch.long)
    attention[:, 0] = 0
    attention[0, -1] = 0
    engine = torch.full((ROWS, RESPONSE), -1.0)
    trainer = engine.clone()
    trainer[0, 3], trainer[2, 1] = 0.0, 0.0
    trainer[1, 2] = -1.5
    trainer[3, 0] = -1.25
    tensors = {
        "prompts": torch.arange(PROMPT).expand(ROWS, -1).clone(),
        "responses": torch.arange(RESPONSE).expand(ROWS, -1) + 10 * torch.arange(ROWS)[:, None],
        "attention_mask": attention,
        "response_mask": generated,
        "rollout_versions": torch.full((ROWS, RESPONSE), 4),
        "rollout_log_probs": engine,
        "old_log_probs": trainer,
    }
    uids = np.array([f"u{row}" for row in range(ROWS)], dtype=object)
    return DataProto(TensorDict(tensors, batch_size=ROWS), {"uid": uids}, {})


def kept(folder, step=5):
    (line,) = (folder / "mismatch" / f"{step}.jsonl").read_text().splitlines()
    return json.loads(line)


def test_the_sequence_with_the_largest_difference_is_kept_without_padding(tmp_path, batch):
    MismatchProbe(tmp_path, 2).keep(5, batch)
    row = kept(tmp_path)
    assert (row["uid"], row["step"], row["trainer_version"]) == ("u1", 5, 4)
    assert (row["prompt_ids"], row["response_ids"]) == ([1, 2], [10, 11, 12, 13])
    assert (row["log_probs"], row["trainer_log_probs"]) == ([-1.0] * 4, [-1.0, -1.0, -1.5, -1.0])


def test_what_no_policy_generated_has_no_log_prob(tmp_path, batch):
    batch.batch["old_log_probs"][2, 2] = -9.0
    MismatchProbe(tmp_path, 2).keep(5, batch)
    row = kept(tmp_path)
    assert row["response_mask"] == [1, 0, 1, 1]
    assert row["versions"] == [4, -1, 4, 4]
    assert (row["log_probs"], row["trainer_log_probs"]) == ([-1.0, None, -1.0, -1.0], [-1.0, None, -9.0, -1.0])


def test_sequences_of_several_versions_or_of_none_that_is_looked_at_are_left_out(tmp_path, batch):
    batch.batch["rollout_versions"][1, 0] = 3
    MismatchProbe(tmp_path, 2).keep(5, batch)
    assert kept(tmp_path)["uid"] == "u3"
    for frequency in (-1, 3):
        MismatchProbe(tmp_path, frequency).keep(6, batch)
    batch.batch["rollout_versions"][:] = 0  # no checkpoint has those weights
    MismatchProbe(tmp_path, 2).keep(7, batch)
    assert [path.name for path in (tmp_path / "mismatch").iterdir()] == ["5.jsonl"]


def test_a_step_that_is_repeated_replaces_its_file(tmp_path, batch):
    probe = MismatchProbe(tmp_path, 2)
    probe.keep(5, batch)
    batch.batch["old_log_probs"][0, 0] = -9.0
    probe.keep(5, batch)
    assert kept(tmp_path)["uid"] == "u0"


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("rollout.calculate_log_probs=false", "rollout.calculate_log_probs=true"),
        ("actor.use_rollout_log_probs=true", "actor.use_rollout_log_probs=false"),
    ],
)
def test_a_run_without_log_probs_of_both_sides_is_refused(override, remedy):
    config = load_config(["trainer.mismatch_probe_freq=5", f"actor_rollout_ref.{override}"])
    assert [line for line in problems_of(config) if "mismatch_probe_freq=5 needs" in line and remedy in line]
