"""A disk that is full when a checkpoint is due, on a file system of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import in_process
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.disk import DiskFull
from verl.utils.tracking import read_metrics

pytestmark = pytest.mark.e2e
MIB = 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("a file system of its own takes root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


class Filled(RayPPOTrainer):
    """The disk is full at the saves of `full_at`."""

    full_at: tuple[int, ...] = ()

    def save_checkpoint(self, step, prompts_state):
        filler = Path(self.config.trainer.output_dir).parent / "filler"
        filler.unlink(missing_ok=True)
        if step in self.full_at:
            with filler.open("wb") as file:
                try:
                    while True:
                        file.write(bytes(MIB))
                        file.flush()
                except OSError:
                    pass
                file.truncate(file.tell() - 2 * MIB)
        super().save_checkpoint(step, prompts_state)


def run(disk: Path, full_at: tuple[int, ...], *overrides: str):
    trainer_class = type("FilledThen", (Filled,), {"full_at": full_at})
    saving = ("trainer.save_freq=1", "trainer.total_training_steps=3", *overrides)
    return in_process(disk, *saving, trainer_class=trainer_class)


def found(disk: Path) -> list[str]:
    return sorted(path.name for path in (disk / "out").glob("*global_step_*"))


def test_a_run_goes_on_when_the_disk_is_full_and_saves_when_it_is_not(ray_cluster, disk, caplog):
    run(disk, (1, 2))
    assert found(disk) == ["global_step_3"]
    partial = disk / "out/.global_step_1.partial/actor"
    assert f"step 1 is not saved, the next save tries again: no space for {partial}: " in caplog.text
    assert [record["step"] for record in read_metrics(disk / "out/metrics.jsonl")] == [1, 2, 3]


def test_a_run_that_cannot_save_its_last_step_says_so_at_its_end_and_keeps_the_step_before(ray_cluster, disk):
    with pytest.raises(DiskFull, match=r"no space for .*\.global_step_3\.partial/actor: \d+ bytes are needed"):
        run(disk, (3,))
    assert found(disk) == ["global_step_1", "global_step_2"]
    assert [record["step"] for record in read_metrics(disk / "out/metrics.jsonl")] == [1, 2, 3]


def test_a_run_can_be_told_to_stop_instead(ray_cluster, disk):
    with pytest.raises(DiskFull, match=r"no space for .*\.global_step_2\.partial/actor"):
        run(disk, (2,), "trainer.on_full_disk=stop")
    assert found(disk) == ["global_step_1"]
