"""Which subjects of commits are accepted, and what is said about the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts.check_commit_message import NOT_IMPERATIVE, VERBS, problems

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "check_commit_message.py"


@pytest.mark.parametrize(
    "message",
    [
        "Reject a bucket of 0 bytes",
        "Let ruff speak of verl/checkpoint_engine",
        "Split the plan\n\nIt had two subjects.\n",
        "Read pieces again\n# Please enter the commit message\n# for your changes.\n",
        "Add " + "x" * 68,
        "Merge branch 'main' into a-branch-whose-name-is-so-long-that-nobody-can-say-it-in-one-breath-at-all",
        'Revert "fixes."',
        "fixup! Reject a bucket of 0 bytes",
    ],
)
def test_a_short_imperative_is_accepted(message: str):
    assert problems(message) == []


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", "capital letter"),
        ("reject a bucket of 0 bytes", "capital letter"),
        ("Add " + "x" * 69, "73 characters"),
        ("Reject a bucket of 0 bytes.", "full stop"),
        ("Reject a bucket\nof 0 bytes", "second line"),
        ("The guide begins with a wire", "'The' is no verb"),
        ("What letting in nobody else costs", "'What' is no verb"),
        ("Fixes the build", "'Fixes' is no imperative"),
        ("Fixed the build", "'Fixed' is no imperative"),
        ("Dropping a bucket", "'Dropping' is no imperative"),
        ("Copied once", "'Copied' is no imperative"),
        ("Made faster", "'Made' is no imperative"),
    ],
)
def test_what_is_wrong_with_a_subject_is_said(message: str, said: str):
    assert any(said in problem for problem in problems(message))


def test_every_verb_is_an_imperative():
    assert not NOT_IMPERATIVE & set(VERBS.split())


def test_pre_commit_runs_it_on_the_message(tmp_path: Path):
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}
    assert hooks["commit-message"]["stages"] == ["commit-msg"]
    assert hooks["commit-message"]["entry"].split()[-1] == str(SCRIPT.relative_to(ROOT))
    assert "commit-msg" in config["default_install_hook_types"]
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text("Fixed it.\n")
    done = subprocess.run([sys.executable, str(SCRIPT), str(message)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "subject of the commit message: 'Fixed' is no imperative: 'Fix', not 'Fixes', 'Fixed' or 'Fixing'",
        "subject of the commit message: it ends with a full stop",
    ]
