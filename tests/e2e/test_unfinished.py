"""A driver that is killed in the middle of conversations with tools: the next one goes on with them."""

from __future__ import annotations

import ast
import json
import shutil
from collections import Counter

import pytest

from tests.e2e import stuck_responses
from tests.e2e.job import QUICK, Job
from tests.e2e.test_training import Run
from verl.experimental.agent_loop import kept_unfinished
from verl.experimental.fully_async_policy import fully_async_main
from verl.experimental.fully_async_policy.trainer import FullyAsyncTrainer
from verl.utils.framed import frames

pytestmark = pytest.mark.e2e
STEPS = 3


def begun_in(output_dir):
    """By uid, the calls of conversations that have begun their second turn, in the files for another driver."""
    path = output_dir / "kept_samples/run"
    if not path.exists():
        return {}
    with path.open("rb") as file:
        ((head, *_),) = frames(file)
    found = kept_unfinished.read(path.parent, 0, head["name"], up_to=STEPS)
    return {ast.literal_eval(name)[0]: calls for name, calls in found_by_uid(found) if len(calls) == 2}


def found_by_uid(found):
    return [(name.split(", SamplingOptions")[0] + ")", calls) for name, calls in found.items()]


def test_a_killed_driver_leaves_conversations_to_the_next_one_which_pays_nothing_twice(
    ray_cluster, warm, tmp_path, tiny_model
):
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: 'tests.experimental.agent_loop.fakes:AddTool'}]")
    rollout = "actor_rollout_ref.rollout"
    overrides = (
        "trainer.n_gpus_per_node=1",
        f"actor_rollout_ref.model.path={tiny_model}",
        f"actor_rollout_ref.model.external_lib={stuck_responses.__name__}",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"{rollout}.name=stuck",
        f"{rollout}.engine_kwargs.stuck.directory={tmp_path}",
        f"{rollout}.n=1",
        f"{rollout}.max_num_seqs=1",
        f"{rollout}.ignore_eos=true",
        f"{rollout}.agent.default_agent_loop=pays",
        f"{rollout}.multi_turn.tool_config_path={tmp_path / 'tools.yaml'}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
        f"trainer.rollout_data_dir={tmp_path / 'samples'}",
        "data.max_response_length=40",
        "async_training.staleness_threshold=1",
        "async_training.trigger_parameter_sync_step=1",
    )
    with Job(tmp_path, *QUICK, *overrides, module=fully_async_main.__name__, warm=warm) as job:
        job.wait_for_checkpoint(1)
        begun = job.wait_for(lambda: begun_in(job.output_dir), "a conversation in a file")
        job.driver.kill()
        job.wait()
    ledger = tmp_path / "ledger"
    shutil.copy(ledger, tmp_path / "before")
    (tmp_path / "gate").touch()
    where = {"config_path": fully_async_main.CONFIG_DIR, "config_name": fully_async_main.CONFIG_NAME}
    run = Run.of(tmp_path, *overrides, trainer_class=FullyAsyncTrainer, **where)
    assert list(run.metrics) == list(range(1, STEPS + 1))
    samples = {sample["uid"]: sample for step in range(1, STEPS + 1) for sample in run.samples(step)}
    assert len(samples) == 2 * STEPS
    for uid, (first, second) in begun.items():  # drawn at random: nobody could draw them a second time
        tokens = [*first.so_far.token_ids, *second.so_far.token_ids]
        assert len(tokens) > stuck_responses.FIRST_TURN
        assert samples[uid]["response_ids"][: len(tokens)] == tokens
        log_probs = [*first.so_far.known().log_probs, *second.so_far.known().log_probs]
        assert samples[uid]["log_probs"][: len(tokens)] == pytest.approx(log_probs)
    paid = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert {
        uid: times for uid, times in Counter(one["uid"] for one in paid).items() if uid in samples
    } == dict.fromkeys(samples, 1)
    before = {json.loads(line)["uid"] for line in (tmp_path / "before").read_text().splitlines()}
    assert before >= set(begun)
    assert not (run.out / "kept_samples").exists()  # it is complete
    assert all(metrics["training/staleness/min"] >= 0 for metrics in run.metrics.values())
