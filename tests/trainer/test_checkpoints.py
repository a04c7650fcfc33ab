import contextlib
import json
import os
import pickle
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from verl.trainer import checkpoints
from verl.trainer.checkpoints import LATEST, CheckpointDirectory, TrainerState, warn_of_lacking_contents
from verl.utils.config import ConfigError
from verl.utils.disk import DiskFull
from verl.utils.file_digests import write_digests
from verl.workers.config import CheckpointConfig, TrainerConfig


@pytest.fixture
def config(tmp_path):
    return TrainerConfig(default_local_dir=str(tmp_path / "out"))


def state(step):
    return TrainerState(step=step, dataloader={"position": step}, kl_coef=0.5, rewards_before={"x": 0.25})


def save(config, *steps):
    for step in steps:
        found = CheckpointDirectory(config)
        with found.writing(state(step)) as directory:
            for part in ("actor", "critic"):
                (directory / part).mkdir()
                (directory / part / "weights").write_text(f"of step {step}")
                write_digests(directory / part, ["weights"], "digests-0.json")
            (directory / "actor/lora_adapter").mkdir()
            (directory / "actor/lora_adapter/adapter_model.safetensors").write_text("for others")
        found.publish()


def names(config):
    return sorted(path.name for path in CheckpointDirectory(config).root.iterdir())


def test_what_was_saved_last_is_found_and_read(config):
    assert CheckpointDirectory(config).find() is None
    save(config, 1, 2)
    found = CheckpointDirectory(config).find()
    assert found.name == "global_step_2"
    assert CheckpointDirectory(config).would_resume_from() == found
    assert CheckpointDirectory.read(found) == state(2)
    assert (found / "actor/weights").read_text() == "of step 2"


def test_a_save_that_does_not_get_to_its_end_leaves_nothing_but_the_last_one(config):
    save(config, 1)
    with (
        pytest.raises(RuntimeError),
        CheckpointDirectory(config).writing(state(2)) as directory,
    ):
        (directory / "actor").mkdir()
        raise RuntimeError("disk full")
    assert names(config) == ["global_step_1", LATEST]
    assert CheckpointDirectory(config).find().name == "global_step_1"
    save(config, 2)  # the same step again, over what was left
    assert names(config) == ["global_step_1", "global_step_2", LATEST]
    assert CheckpointDirectory(config).find().name == "global_step_2"


def test_a_run_can_be_told_to_start_again(config):
    save(config, 1)
    anew = CheckpointDirectory(replace(config, resume_mode="disable"))
    assert anew.would_resume_from() is anew.find() is None


def test_a_run_can_be_told_where_to_go_on(config, tmp_path):
    save(config, 1, 2)
    earlier = CheckpointDirectory(config).root / "global_step_1"
    resume = replace(config, resume_mode="resume_path", resume_from_path=str(earlier))
    assert CheckpointDirectory(resume).would_resume_from() == CheckpointDirectory(resume).find() == earlier
    for looked in (CheckpointDirectory.find, CheckpointDirectory.would_resume_from):
        with pytest.raises(ConfigError, match="is not a checkpoint"):
            looked(CheckpointDirectory(replace(resume, resume_from_path=str(tmp_path))))


def test_a_pointer_to_something_incomplete_is_an_error_not_a_fresh_start(config):
    save(config, 1)
    (CheckpointDirectory(config).root / "global_step_1/trainer.json").unlink()
    with pytest.raises(ConfigError, match=r"global_step_1, which is not a complete checkpoint.*resume_mode=disable"):
        CheckpointDirectory(config).find()


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


ADAPTER = "actor/lora_adapter/adapter_model.safetensors"
DAMAGE = {
    "flipped": (flip, "has other bytes than when it was written"),
    "cut": (cut, r"has \d+ bytes, and had \d+ when it was written"),
    "gone": (Path.unlink, "cannot be read: No such file"),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("file", ["data.pt", "actor/weights", "critic/weights", "critic/digests-0.json", ADAPTER])
def test_a_damaged_file_is_named_and_the_newest_whole_checkpoint_offered(config, caplog, file, how):
    save(config, 1, 2, 3, 4)
    root = CheckpointDirectory(config).root
    spoil, words = DAMAGE[how]
    spoil(root / "global_step_4" / file)
    flip(root / "global_step_3" / "actor/weights")
    offered = f"The newest whole one is {root / 'global_step_2'}: set .*trainer.resume_from_path="
    with pytest.raises(ConfigError, match=rf"points to .*global_step_4.*{file} {words}.*{offered}"):
        CheckpointDirectory(config).find()
    named = replace(config, resume_mode="resume_path", resume_from_path=str(root / "global_step_4"))
    with pytest.raises(ConfigError, match=rf"trainer.resume_from_path=.*{file} {words}.*{offered}"):
        CheckpointDirectory(named).find()
    with caplog.at_level("WARNING"):
        assert CheckpointDirectory(replace(config, resume_fallback=True)).find() == root / "global_step_2"
    assert f"going on from {root / 'global_step_2'}" in caplog.text


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_a_part_that_is_gone_with_all_that_it_notes_is_named(config, part):
    save(config, 1, 2)
    root = CheckpointDirectory(config).root
    shutil.rmtree(root / "global_step_2" / part)
    with pytest.raises(ConfigError, match=rf"global_step_2/{part}/digests-0.json cannot be read: No such file"):
        CheckpointDirectory(config).find()
    assert CheckpointDirectory(replace(config, resume_fallback=True)).find() == root / "global_step_1"


def test_what_a_checkpoint_notes_of_its_files_may_be_damaged_too(config):
    save(config, 1)
    (CheckpointDirectory(config).root / "global_step_1/digests.json").write_text("{")
    with pytest.raises(ConfigError, match=r"what .*global_step_1 notes of its files cannot be read"):
        CheckpointDirectory(replace(config, resume_fallback=True)).find()


def test_only_of_checkpoints_that_never_had_digests_they_may_be_missing(config):
    save(config, 1)
    path = CheckpointDirectory(config).root / "global_step_1"
    for file in path.rglob("digests*.json"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"damaged: .*global_step_1/digests.json is gone"):
        CheckpointDirectory(config).find()
    record = json.loads((path / "trainer.json").read_text())
    del record["has_digests"]
    (path / "trainer.json").write_text(json.dumps(record))
    assert CheckpointDirectory(config).find() == path


def test_of_large_checkpoints_the_driver_compares_sizes_alone(config, monkeypatch):
    monkeypatch.setattr(checkpoints, "COMPARED_NBYTES", 3)
    save(config, 1)
    path = CheckpointDirectory(config).root / "global_step_1"
    flip(path / "actor/weights")  # its ranks find that
    assert CheckpointDirectory(config).find() == path
    cut(path / "actor/weights")
    with pytest.raises(ConfigError, match="actor/weights has"):
        CheckpointDirectory(config).find()


def test_what_was_written_first_is_deleted_first_and_nothing_else_is(config):
    config = replace(config, max_actor_ckpt_to_keep=2)
    save(config, 8, 9)
    (CheckpointDirectory(config).root / "global_step_1.best").mkdir()
    save(config, 10)
    assert names(config) == ["global_step_1.best", "global_step_10", "global_step_9", LATEST]


def test_none_is_deleted_while_what_was_saved_last_may_be_no_good(config):
    config = replace(config, max_actor_ckpt_to_keep=1)
    checkpoints = CheckpointDirectory(config)
    for step, keeps_all in ((1, False), (2, True), (3, True), (4, False)):
        checkpoints.keeps_all = keeps_all
        with checkpoints.writing(state(step)):
            pass
        checkpoints.publish()
        assert steps(config) == ({4} if step == 4 else set(range(1, step + 1)))


def steps(config):
    return {int(name.removeprefix("global_step_")) for name in names(config) if name.startswith("global_step_")}


def run(config, *written, resume_from=None, again=False):
    """A run that writes the checkpoints of some steps; `again`: it resumes by itself."""
    mode = "resume_path" if resume_from else "auto" if again else "disable"
    path = str(CheckpointDirectory(config).root / f"global_step_{resume_from}") if resume_from else None
    directory = CheckpointDirectory(replace(config, resume_mode=mode, resume_from_path=path))
    directory.find()
    for step in written:
        with directory.writing(state(step)) as partial:
            (partial / "weights").write_text(f"of step {step}")
        directory.publish()


@pytest.mark.parametrize(
    ("runs", "keep", "left"),
    [
        ([((20, 40), {}), ((10,), {})], 1, {10}),
        ([((20, 40), {}), ((10,), {})], 2, {40, 10}),
        ([((40, 20), {}), ((10,), {})], 2, {20, 10}),
        ([((20, 40), {}), ((10, 15), {})], 1, {15}),
        ([((1, 2, 3), {}), ((), {"resume_from": 1}), ((4,), {"again": True})], 1, {4}),
        ([((1, 2, 3), {}), ((2,), {"resume_from": 1})], None, {1, 2, 3}),
        ([((5,), {}), ((10,), {}), ((6, 7), {"resume_from": 10})], 1, {10, 7}),
    ],
)
def test_what_was_written_last_is_kept_whatever_its_step(config, runs, keep, left):
    for index, one in enumerate(runs):
        run(replace(config, max_actor_ckpt_to_keep=keep if index == len(runs) - 1 else None), *one[0], **one[1])
    assert steps(config) == left
    found = CheckpointDirectory(config).find()
    assert CheckpointDirectory.read(found).step == runs[-1][0][-1]


def test_a_run_that_branches_keeps_what_it_came_from_also_when_it_is_resumed(config):
    config = replace(config, max_actor_ckpt_to_keep=1)
    run(replace(config, max_actor_ckpt_to_keep=None), 1, 2, 3)
    run(config, 2, 4, resume_from=1)
    assert steps(config) == {1, 4}
    run(config, 5, 6, again=True)
    assert steps(config) == {1, 6}
    run(config, 3)
    assert steps(config) == {3}


def test_checkpoints_that_do_not_say_when_they_were_written_are_ordered_by_their_files(config):
    run(config, 1, 2, 3)
    for step, written_s in ((1, 300), (2, 100), (3, 200)):
        record = CheckpointDirectory(config).root / f"global_step_{step}" / "trainer.json"
        content = json.loads(record.read_text())
        del content["serial"], content["branched_from"]
        record.write_text(json.dumps(content))
        os.utime(record, (written_s, written_s))
    run(replace(config, max_actor_ckpt_to_keep=3), 4)
    assert steps(config) == {1, 3, 4}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("call", range(1, 5))
def test_a_run_that_is_killed_while_it_replaces_the_last_checkpoint_leaves_one_to_resume_from(
    config, monkeypatch, call
):
    run(config, 1, 2)
    renames = []

    def rename(path, target):
        renames.append(path)
        if len(renames) == call:
            raise Killed
        return os.rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with contextlib.suppress(Killed):
            run(config, 2, resume_from=1)
    found = CheckpointDirectory(config).find()
    assert CheckpointDirectory.read(found) == state(2)
    run(config, 3, again=True)
    assert names(config) == ["global_step_1", "global_step_2", "global_step_3", LATEST]


@pytest.mark.parametrize("content", [b"", b"x", b"-1", b"../../etc", b"\xff\xfe", b"1\x00", "\u0661".encode()])
def test_a_pointer_that_holds_no_step_is_an_error(config, content):
    save(config, 1)
    (CheckpointDirectory(config).root / LATEST).write_bytes(content)
    with pytest.raises(ConfigError, match=r"does not hold the number of a step.*resume_mode=disable"):
        CheckpointDirectory(config).find()


class Opens:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("save_it", [torch.save, lambda it, path: path.write_bytes(pickle.dumps(it))])
def test_reading_a_checkpoint_runs_no_code_of_it(config, tmp_path, save_it):
    save(config, 1)
    found = CheckpointDirectory(config).find()
    save_it(Opens(tmp_path / "ran"), found / "data.pt")
    with pytest.raises(ConfigError, match=r"data\.pt is not the position of a checkpoint"):
        CheckpointDirectory.read(found)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"{}", b"\xff", b'{"step": "x"}', b"[" * 100_000, b'{"step": 1e999}']
)
def test_a_record_that_is_none_is_an_error(config, content):
    save(config, 1)
    found = CheckpointDirectory(config).root / "global_step_1"
    (found / "trainer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"trainer\.json is not the record of a checkpoint"):
        CheckpointDirectory.read(found)


@pytest.mark.parametrize(
    ("saved", "loaded", "words"),
    [
        (["model", "optimizer", "extra"], ["model", "optimizer", "extra"], None),
        (["hf_model", "model", "optimizer", "extra"], ["model", "optimizer", "extra"], None),
        (["model"], ["model"], None),
        (["model"], ["model", "hf_model"], None),
        (["hf_model"], ["model", "optimizer", "extra"], "=[hf_model] lacks model, optimizer, extra: no run can"),
        (["model", "extra"], ["model", "optimizer", "extra"], "=[model,extra] lacks optimizer: no run can resume"),
        ([], ["model"], "=[] lacks model"),
    ],
)
def test_checkpoints_from_which_no_run_can_go_on_are_told_when_they_are_configured(caplog, saved, loaded, words):
    warn_of_lacking_contents("a.checkpoint", CheckpointConfig(save_contents=saved, load_contents=loaded))
    assert [words in record.getMessage() for record in caplog.records] == ([True] if words else [])


def limit_files(nbytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_full_disk_is_told_and_leaves_the_last_checkpoint_alone(config):
    save(config, 1)
    large = TrainerState(step=2, dataloader={"rows": bytes(100_000)}, kl_coef=0.5, rewards_before={})
    checkpoints = CheckpointDirectory(config)
    limit_files(10_000)
    try:
        with (
            pytest.raises(
                DiskFull, match=r"no space for .*\.global_step_2\.partial: 10\d{4} bytes are needed, \d+ bytes"
            ),
            checkpoints.writing(large),
        ):
            pass
    finally:
        limit_files(-1)
    checkpoints.publish()
    assert names(config) == ["global_step_1", LATEST]
    with checkpoints.writing(large):
        pass
    checkpoints.publish()
    assert CheckpointDirectory.read(CheckpointDirectory(config).find()) == large


def test_what_is_not_published_does_not_count(config):
    save(config, 1)
    with CheckpointDirectory(config).writing(state(2)):
        pass
    assert CheckpointDirectory(config).find().name == "global_step_1"
    save(config, 3)
    assert steps(config) == {1, 3}
    assert not list(CheckpointDirectory(config).root.glob(".global_step*"))


def test_what_a_run_branched_from_is_known_under_any_name_of_its_directory(config, tmp_path):
    config = replace(config, max_actor_ckpt_to_keep=1)
    run(replace(config, max_actor_ckpt_to_keep=None), 1, 2)
    (tmp_path / "link").symlink_to(CheckpointDirectory(config).root)
    path = str(tmp_path / "link/global_step_1")
    directory = CheckpointDirectory(replace(config, resume_mode="resume_path", resume_from_path=path))
    directory.find()
    with directory.writing(state(3)):
        pass
    directory.publish()
    assert steps(config) == {1, 3}


def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(config, caplog, monkeypatch):
    config = replace(config, max_actor_ckpt_to_keep=1)
    save(config, 1)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None if ignore_errors else refuse(path))
        save(config, 2)
    assert "global_step_1, which is old, cannot be deleted" in caplog.text
    assert CheckpointDirectory(config).find().name == "global_step_2"
