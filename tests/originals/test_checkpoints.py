"""Checkpoints against PyPI's verl: which of them are left after every save, and which one is found as the last."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.originals.original import VERL, computed, differences
from verl.trainer.checkpoints import CheckpointDirectory, TrainerState
from verl.workers.config import TrainerConfig

CASES = {
    **{f"one run, {keep} kept": {"keep": keep, "runs": [[10, 20, 30, 40, 50]]} for keep in (1, 2, 3, 9)},
    "all kept": {"keep": None, "runs": [[10, 20, 30]]},
    "a step for each": {"keep": 2, "runs": [[1, 2, 3, 4, 10, 11]]},
}


def drawn(draw: Random) -> dict[str, Any]:
    """One run that saves at growing steps; how many are kept may be more than there are."""
    steps = sorted(draw.sample(range(1, 2000), draw.randint(1, 9)))
    return {"keep": draw.choice((None, *range(1, 11))), "runs": [steps]}


CASES |= {f"drawn {number}": drawn(Random(number)) for number in range(12)}
RESUMED = {"keep": 2, "runs": [[10, 20, 30], [40, 50, 60]]}


def saved(given: dict[str, Any], folder: Path) -> list[list[int]]:
    """The steps that are left after each save."""
    config = TrainerConfig(
        default_local_dir=str(folder), max_actor_ckpt_to_keep=given["keep"], resume_mode="auto", save_freq=1
    )
    found = []
    for steps in given["runs"]:
        directory = CheckpointDirectory(config)
        directory.find()
        for step in steps:
            with directory.writing(TrainerState(step=step, dataloader={}, kl_coef=0.0, rewards_before={})) as partial:
                (partial / "actor").mkdir()
            directory.publish()
            found.append(sorted(int(path.name.rpartition("_")[2]) for path in folder.glob("global_step_*")))
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("checkpoints")
    cases = [*CASES.values(), RESUMED]
    ours = [saved(case, root / f"ours{number}") for number, case in enumerate(cases)]
    given = {
        "cases": [{**case, "folder": str(root / f"verl{number}")} for number, case in enumerate(cases)],
        "written": [str(root / f"ours{number}") for number in range(len(cases))],
    }
    return {"ours": ours, **computed("rotate.py", given, VERL)}


@pytest.mark.parametrize("name", CASES)
def test_verls_checkpoints_are_left_after_every_save(both: dict[str, Any], name: str) -> None:
    number = [*CASES].index(name)
    assert both["ours"][number] == both["left"][number]


def test_a_run_that_goes_on_counts_what_is_there_and_verls_does_not(both: dict[str, Any]) -> None:
    assert both["ours"][-1][-1] == [50, 60]
    assert set(both["left"][-1][-1]) > {50, 60}
    assert differences()["checkpoints of a run that was resumed"]["why"]


def test_verl_finds_the_last_checkpoint_that_was_written_here(both: dict[str, Any]) -> None:
    last = [case["runs"][-1][-1] for case in (*CASES.values(), RESUMED)]
    assert both["latest"] == [f"global_step_{step}" for step in last]
