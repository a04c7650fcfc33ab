"""A run whose responses a reward model scores that a function asks; one with a head is in test_launches.py."""

import json

import pytest

pytestmark = pytest.mark.e2e
SERVED = (
    "trainer.total_training_steps=1",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "data.val_max_samples=2",
    "reward.reward_model.enable=True",
    "reward.reward_model.rollout.name=vllm",
    "reward.reward_model.rollout.prompt_length=128",
    "reward.reward_model.rollout.response_length=64",
    "reward.reward_model.rollout.dtype=float32",
    "reward_model.rollout.cpu_kvcache_gib=0.1",
    "reward_model.timeout_s=300",  # a busy machine needs longer than the default
)
JUDGE = """
import http.client, json

async def judge(data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer):
    ask = {"model": MODEL, "messages": [{"role": "user", "content": solution_str}], "max_tokens": 3, "temperature": 0}
    connection = http.client.HTTPConnection(reward_router_address, timeout=120)
    connection.request("POST", "/v1/chat/completions", json.dumps(ask), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    return {"score": 0.25, "judged": len(reward_model_tokenizer.encode(answer["choices"][0]["message"]["content"]))}
"""


def samples(directory):
    return [json.loads(line) for file in sorted(directory.iterdir()) for line in file.read_text().splitlines()]


def test_a_function_asks_a_model_that_writes(start, warm, tmp_path, tiny_model):
    (tmp_path / "judge.py").write_text(JUDGE.replace("MODEL", repr(str(tiny_model))))
    job = start(
        f"reward.reward_model.model_path={tiny_model}",
        f"reward.custom_reward_function.path={tmp_path / 'judge.py'}",
        "reward.custom_reward_function.name=judge",
        f"trainer.rollout_data_dir={tmp_path / 'samples'}",
        *SERVED,
        warm=warm,
    )
    assert job.wait() == 0, job.stderr
    assert {sample["score"] for sample in samples(tmp_path / "samples")} == {0.25}
