"""What a run writes is its user's alone: read and write for the owner, nothing for anybody else."""

import contextlib
import stat
import time
from pathlib import Path

import pytest

from verl.checkpoint_engine.support import envs

pytestmark = [pytest.mark.e2e, pytest.mark.cells(2)]


def open_to(path: Path, others: int) -> list[str]:
    """Everything in `path` with a permission of `others`. Links have none of their own."""
    found = [path, *path.rglob("*")]
    return [
        f"{stat.filemode(entry.lstat().st_mode)} {entry.relative_to(path)}"
        for entry in found
        if not entry.is_symlink() and entry.lstat().st_mode & others
    ]


def modes_while_it_runs(job, directory: Path) -> tuple[int, list[str]]:
    """How much of the run was seen in shared memory, and what of it was open to others."""
    seen, opened = set(), set()
    while job.driver.poll() is None:
        for path in directory.glob(f"verl-{job.driver.pid}-*"):
            with contextlib.suppress(FileNotFoundError):
                seen.update(path.rglob("*"))
                opened.update(open_to(path, 0o077))
        time.sleep(0.02)
    return len(seen), sorted(opened)


@pytest.mark.parametrize(("key", "others", "opened"), [((), 0o077, False), (("trainer.files_for=group",), 0o027, True)])
def test_files_of_a_run_are_its_users_alone_unless_a_key_says_otherwise(start, warm, tmp_path, key, others, opened):
    samples, validation = tmp_path / "samples", tmp_path / "validation"
    job = start(
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        f"trainer.rollout_data_dir={samples}",
        f"trainer.validation_data_dir={validation}",
        f"ray_kwargs.timeline_json_file={tmp_path / 'ray.json'}",
        f"global_profiler.save_path={tmp_path / 'profile'}",
        "global_profiler.tool=torch",
        "global_profiler.steps=[1]",
        "actor_rollout_ref.actor.profiler.enable=true",
        "actor_rollout_ref.actor.profiler.all_ranks=true",
        *key,
        warm=warm,
    )
    seen_in_memory, open_in_memory = modes_while_it_runs(job, envs.shm_dir())
    assert job.wait() == 0, job.stderr
    written = [job.output_dir, samples, validation, tmp_path / "ray.json", tmp_path / "profile"]
    assert {path.name for path in job.output_dir.iterdir()} > {"metrics.jsonl", "sync_reports.jsonl", "global_step_1"}
    assert [line for path in written for line in open_to(path, others)] == []
    assert all(bool(open_to(path, 0o077)) == opened for path in written)
    assert seen_in_memory > 3  # a slot, its manifest, which of them is current, a lock
    assert open_in_memory == []
