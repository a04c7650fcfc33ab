import json

import numpy as np
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.samples import SampleWriter
from verl.workers.reward_manager import RewardOutput


def write(writer, step, uid):
    columns = {name: np.empty(1, dtype=object) for name in ("uid", "raw_prompt", "reward_model")}
    columns["uid"][0], columns["raw_prompt"][0] = uid, [{"role": "user", "content": "1+1"}]
    columns["reward_model"][0] = {"ground_truth": "2"}
    reward = RewardOutput(reward_tensor=torch.tensor([[0.5]]), responses=["2"], extra_info={})
    writer.write(step, DataProto.from_dict(non_tensors=columns), reward)


def uids(path):
    return [json.loads(line)["uid"] for line in path.read_text().splitlines()]


def test_the_parts_of_a_step_are_in_one_file_and_those_of_a_run_that_was_killed_are_replaced(tmp_path):
    killed = SampleWriter(tmp_path)
    write(killed, 1, "a")
    write(killed, 2, "b")
    resumed = SampleWriter(tmp_path)
    write(resumed, 2, "c")
    write(resumed, 2, "d")
    assert uids(tmp_path / "1.jsonl") == ["a"]
    assert uids(tmp_path / "2.jsonl") == ["c", "d"]
