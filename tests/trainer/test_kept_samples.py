"""The files of samples that no checkpoint has yet."""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import replace

import pytest
import torch

from tests.full_disk import no_file_larger_than
from verl.protocol import DataProto
from verl.trainer.config.loader import load_config
from verl.trainer.kept_samples import NAME, Amount, KeptSamples, amount_of, discard
from verl.trainer.run_identity import identity_of

OURS = {"seed": "1", "model": "a"}


def batch(number):
    """Two responses with three tokens of the policy."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    return DataProto.from_dict({"responses": torch.full((2, 3), number), "response_mask": mask}, {"uid": ["a", "b"]})


def kept(directory, *files, identity=OURS):
    """With a record for each number in each of `files`, from the one of step 4 on."""
    samples = KeptSamples(directory, identity)
    for step, numbers in enumerate(files, 4):
        samples.begin(step)
        for number in numbers:
            samples.append(step, (number, batch(number)), batch(number))
    return samples


def numbers(found):
    return [record.content[0] for record in found.records]


def test_another_process_reads_what_was_written_in_its_order(tmp_path):
    kept(tmp_path, [3, 1], [2])
    found = KeptSamples(tmp_path, OURS).read(4)
    assert [(record.number, record.content[0]) for record in found.records] == [(4, 3), (4, 1), (5, 2)]
    assert torch.equal(found.records[0].content[1].batch["responses"], batch(3).batch["responses"])
    assert found.records[0].content[1].non_tensor_batch["uid"].tolist() == ["a", "b"]
    assert found.records[0].amount == amount_of(batch(3)) == Amount(2, 3)
    assert found.dropped == {}


def test_nobody_else_may_read_it(tmp_path):
    kept(tmp_path, [1])
    paths = [tmp_path / NAME, *(tmp_path / NAME).iterdir()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o700, 0o600]


@pytest.mark.parametrize("step", [3, 7])
def test_nothing_is_taken_after_another_checkpoint(tmp_path, step):
    kept(tmp_path, [1], [2])
    assert numbers(KeptSamples(tmp_path, OURS).read(step)) == []
    assert list((tmp_path / NAME).iterdir()) == []


def test_what_the_checkpoint_has_is_deleted_and_what_follows_is_taken(tmp_path):
    kept(tmp_path, [1], [2], [3])
    KeptSamples(tmp_path, OURS).forget_before(5)
    assert numbers(KeptSamples(tmp_path, OURS).read(5)) == [2, 3]


def test_nothing_of_another_run_is_taken_and_the_log_says_in_what_it_differs(tmp_path, caplog):
    kept(tmp_path, [1, 2])
    caplog.set_level(logging.INFO)
    found = KeptSamples(tmp_path, OURS | {"model": "b"}).read(4)
    found.tell(Amount())
    assert numbers(found) == []
    assert "dropped: 4 responses of 6 tokens, of a run with another model" in caplog.text
    assert found.lost.metrics("kept_dropped")["rollout/kept_dropped_tokens"] == 6
    assert list((tmp_path / NAME).iterdir()) == []


def test_a_record_that_was_being_written_is_left_out_and_others_can_follow(tmp_path):
    samples = kept(tmp_path, [1, 2])
    (file,) = (tmp_path / NAME).iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    samples.begin(4)
    samples.append(4, (3, batch(3)), batch(3))
    assert numbers(KeptSamples(tmp_path, OURS).read(4)) == [1, 3]


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_nothing_from_a_flipped_byte_on_is_taken(tmp_path, at):
    kept(tmp_path, [1], [2, 3], [4])
    file = tmp_path / NAME / "00000005.samples"
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= 1
    file.write_bytes(content)
    taken = KeptSamples(tmp_path, OURS).read(4)
    assert numbers(taken) == ([1, 2] if at == 0.9 else [1])
    assert taken.dropped["damaged, or after a damaged one"].responses >= 2
    assert numbers(KeptSamples(tmp_path, OURS).read(4)) == numbers(taken)  # and what is left is whole


def test_no_more_is_kept_than_there_is_room_for_until_the_next_checkpoint(tmp_path, caplog):
    samples = kept(tmp_path, [1])
    samples.most_nbytes = sum(path.stat().st_size for path in (tmp_path / NAME).iterdir()) + 10
    for number in (2, 3):
        samples.append(4, (number, batch(number)), batch(number))
    samples.begin(5)
    samples.forget_before(5)
    samples.append(5, (4, batch(4)), batch(4))
    assert caplog.text.count("no others are kept") == 1
    assert numbers(KeptSamples(tmp_path, OURS).read(5)) == [4]


def test_what_follows_a_sample_that_was_left_out_is_not_taken(tmp_path):
    samples = kept(tmp_path, [1])
    samples.most_nbytes = 0
    samples.append(4, (2, batch(2)), batch(2))
    samples.most_nbytes = 2**30
    samples.begin(5)
    samples.append(5, (3, batch(3)), batch(3))
    found = KeptSamples(tmp_path, OURS).read(4)
    assert (numbers(found), found.dropped) == ([1], {"for which there was no room": Amount(2, 3)})


def test_the_next_samples_follow_the_last_file_that_is_taken(tmp_path):
    kept(tmp_path, [1], [2])
    samples = KeptSamples(tmp_path, OURS)
    assert (last := samples.read(4).last) == 5
    samples.append(last, (3, batch(3)), batch(3))
    assert numbers(KeptSamples(tmp_path, OURS).read(4)) == [1, 2, 3]


def test_what_another_command_left_is_discarded_and_what_this_one_wrote_stays(tmp_path):
    kept(tmp_path, [1], [2])
    os.utime(tmp_path / NAME / "00000004.samples", (1, 1))
    discard(tmp_path, before_s=2.0)
    assert numbers(KeptSamples(tmp_path, OURS).read(5)) == [2]
    discard(tmp_path)
    assert not (tmp_path / NAME).exists()


def test_a_full_disk_ends_the_keeping_and_not_the_run(tmp_path, caplog):
    samples = kept(tmp_path, [1])
    with no_file_larger_than(1024):
        samples.append(4, (2, batch(2)), batch(2))
    samples.append(4, (3, batch(3)), batch(3))
    assert "samples are not kept" in caplog.text
    assert not (tmp_path / NAME).exists()


def test_a_value_that_no_file_can_hold_ends_the_keeping_and_not_the_run(tmp_path, caplog):
    samples = kept(tmp_path, [1])
    samples.append(4, object(), batch(2))
    assert "cannot hold" in caplog.text
    assert not (tmp_path / NAME).exists()


def test_settings_that_decide_about_samples_identify_a_run_and_others_do_not(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("one")
    (model := tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")

    def identity(*overrides, source="data"):
        paths = (f"actor_rollout_ref.model.path={model}", f"custom_reward_function.path={reward}")
        return identity_of(load_config([*paths, *overrides]), "Loop", source)

    ours = identity()
    assert identity("trainer.total_training_steps=9", "trainer.resume_mode=auto", "trainer.save_freq=1") == ours

    def differ(other):
        return {name for name in ours if ours[name] != other[name]}

    assert differ(identity("trainer.seed=2")) >= {"seed"}
    assert differ(identity("actor_rollout_ref.rollout.temperature=0.5")) == {"actor_rollout_ref.rollout"}
    assert differ(identity("trainer.experiment_name=other")) == {"experiment"}
    assert differ(identity(source="other")) == {"training data"}
    reward.write_text("two")
    assert differ(identity()) == {"file of settings"}


def test_another_model_at_the_same_path_is_another_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1")
    config = load_config([])
    policy = config.actor_rollout_ref
    config = replace(config, actor_rollout_ref=replace(policy, model=replace(policy.model, path=str(tmp_path))))
    before = identity_of(config, "Loop", "")
    (tmp_path / "model.safetensors").write_bytes(b"2")
    after = identity_of(config, "Loop", "")
    assert [name for name in before if before[name] != after[name]] == ["model"]
