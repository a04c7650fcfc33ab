import json

import numpy as np
import pytest
import torch

from verl.experimental.agent_loop.batching import to_batch
from verl.experimental.agent_loop.output import Response
from verl.protocol import DataProto
from verl.trainer.ppo import samples
from verl.trainer.ppo.samples import SampleWriter, without_secrets
from verl.workers.reward_manager import RewardOutput
from verl.workers.rollout.records import TokenOutput, WeightVersionSpan


def trajectory(prompt, turns, log_probs=True):
    """`turns`: (tokens, version, replica) of what was generated, or the tokens of a tool's answer."""
    response = Response(limit=8)
    for turn in turns:
        if isinstance(turn, list):
            response.add_inserted(turn)
            continue
        tokens, version, replica = turn
        spans = (WeightVersionSpan(0, len(tokens), version),)
        output = TokenOutput(tokens, [-0.5] * len(tokens) if log_probs else None, "completed", spans)
        response.add_generated(output.by(replica))
    return response.output(prompt, num_turns=2, stop_reason="completed", metrics={})


def write(writer, step, uids, outputs=None, extra=None):
    outputs = outputs or [trajectory([5], [([6], 1, "replica-0")]) for _ in uids]
    prompts = DataProto.from_dict(
        non_tensors={
            "uid": uids,
            "raw_prompt": [[{"role": "user", "content": "1+1"}] for _ in uids],
            "reward_model": [{"ground_truth": "2"} for _ in uids],
            "data_source": ["sums" for _ in uids],
            "index": [7 for _ in uids],
        }
    )
    batch = prompts.union(to_batch(outputs, prompt_length=4, response_length=8, pad_token_id=0))
    rewards = torch.zeros(len(uids), 8)
    rewards[:, 0] = 0.5
    writer.write(
        step, batch, RewardOutput(reward_tensor=rewards, responses=["2" for _ in uids], extra_info=extra or {})
    )


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def uids(path):
    return [row["uid"] for row in rows(path)]


def test_the_parts_of_a_step_are_in_one_file_and_those_of_a_run_that_was_killed_are_replaced(tmp_path):
    killed = SampleWriter(tmp_path)
    write(killed, 1, ["a"])
    write(killed, 2, ["b"])
    resumed = SampleWriter(tmp_path)
    write(resumed, 2, ["c"])
    write(resumed, 2, ["d"])
    assert uids(tmp_path / "1.jsonl") == ["a"]
    assert uids(tmp_path / "2.jsonl") == ["c", "d"]


def test_what_was_written_of_a_step_that_is_made_again_is_replaced(tmp_path):
    writer = SampleWriter(tmp_path)
    for step in (1, 2):
        write(writer, step, ["a"])
    writer.forget_after(1)
    write(writer, 2, ["b"])
    write(writer, 2, ["c"])
    assert uids(tmp_path / "1.jsonl") == ["a"]
    assert uids(tmp_path / "2.jsonl") == ["b", "c"]


def test_a_sample_says_which_version_and_which_engine_made_each_token_and_every_number_of_its_reward(tmp_path):
    outputs = [
        trajectory([5, 6], [([11, 12], 3, "replica-0"), [0, 13], ([14], 4, "replica-1"), ([15], 5, "replica-1")]),
        trajectory([7], [([0], 4, "replica-1")]),  # the padding token, generated
    ]
    extra = {"accuracy": [np.float32(1.0), float("nan")], "parts": [{"format": np.int64(1)}, None]}
    write(SampleWriter(tmp_path), 3, ["a", "b"], outputs, extra)
    first, second = rows(tmp_path / "3.jsonl")
    assert first == {
        "step": 3,
        "uid": "a",
        "index": 7,
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "1+1"}],
        "replicas": [["replica-0", 0, 2], ["replica-1", 4, 6]],
        "num_turns": 2,
        "stop_reason": "completed",
        "response": "2",
        "ground_truth": "2",
        "score": 0.5,
        "reward": {"accuracy": 1.0, "parts": {"format": 1}},
        "prompt_ids": [5, 6],
        "response_ids": [11, 12, 0, 13, 14, 15],
        "response_mask": [1, 1, 0, 0, 1, 1],
        "versions": [3, 3, -1, -1, 4, 5],
        "log_probs": [-0.5, -0.5, 0.0, 0.0, -0.5, -0.5],
    }
    assert (second["response_ids"], second["versions"]) == ([0], [4])
    assert second["replicas"] == [["replica-1", 0, 1]]
    assert second["reward"] == {"accuracy": None, "parts": None}


def test_log_probs_that_nobody_asked_for_are_null(tmp_path):
    write(SampleWriter(tmp_path), 1, ["a"], [trajectory([5], [([6], 1, "replica-0")], log_probs=False)])
    assert rows(tmp_path / "1.jsonl")[0]["log_probs"] is None


def test_the_console_shows_what_people_read(caplog):
    caplog.set_level("INFO")
    outputs = [trajectory([5], [([6], 1, "replica-0")]) for _ in range(2)]

    class Shown:
        def write(self, step, batch, reward):
            SampleWriter.show("held-out sample, step 1", batch, reward, 1)

    write(Shown(), 1, ["a", "b"], outputs)
    (record,) = [record for record in caplog.records if record.name.startswith("verl.")]
    first, *lines = [line.strip("|+- ") for line in record.getMessage().splitlines()]
    assert first == "held-out sample, step 1, sums: score 0.5"
    assert [line.split() for line in lines if line] == [["prompt", "user:", "1+1"], ["answer", "2"], ["truth", "2"]]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]},
            "user: <image> how many?",
        ),
        ({"role": "user", "content": ["how", "many?"]}, "user: how many?"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "assistant:"),
        ({"board": [1, 2]}, "{'board': [1, 2]}"),
        ("how many?", "how many?"),
    ],
)
def test_prompts_of_any_form_are_shown(message, shown):
    told = samples._told({"prompt": [message], "response": "3", "ground_truth": None})
    assert told.pop("prompt").strip() == shown
    assert told == {"answer": "3"}


def test_no_secret_of_the_environment_is_shown(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "abc123xyz")
    monkeypatch.setenv("HF_TOKEN", "a")
    monkeypatch.setenv("EDITOR_OF_MINE", "nano-editor")
    assert without_secrets("export abc123xyz; nano-editor a") == "export ***; nano-editor a"
