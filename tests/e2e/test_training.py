"""Whole training runs: what they compute, write, save and leave behind.

A run costs seconds of start-up, so each fixture is one run with many options, and several tests look at it.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoint_engine.backends import using
from tests.docs.printed import form, shown
from tests.e2e.job import QUICK, Job, in_process
from tests.e2e.seeded import STATEFUL
from verl.trainer.ppo.ray_trainer import TrainingResult
from verl.utils.builtin import make_tiny_model
from verl.utils.builtin.tokenizer import VOCAB_SIZE
from verl.utils.timing import Span, read_spans
from verl.utils.tracking import read_metrics

pytestmark = pytest.mark.e2e

EVERY_STEP = {
    "actor": ["pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy", "grad_norm", "lr"],
    "critic/score": ["mean", "max", "min"],
    "critic/rewards": ["mean", "max", "min"],
    "critic/advantages": ["mean", "max", "min"],
    "critic/returns": ["mean"],
    "response_length": ["mean", "max", "min", "clip_ratio"],
    "prompt_length": ["mean"],
    "response": ["aborted_ratio"],
    "num_turns": ["mean"],
    "timing_s": ["gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights", "step"],
    "timing_per_token_ms": ["gen"],
    "perf": ["throughput", "time_per_step", "total_num_tokens", "mfu/actor"],
    "training": [
        "global_step",
        "epoch",
        "rollout_probs_diff_mean",
        "rollout_probs_diff_max",
        "rollout_probs_diff_std",
        "rollout_actor_probs_pearson_corr",
    ],
    "checkpoint_engine": ["total_s", "gbytes_per_s", "nbytes_moved", "trainer_blocked_s"],
    "rollout": ["restarts"],
}
"""verl's names, and ours."""


@dataclass(frozen=True)
class Run:
    directory: Path
    result: TrainingResult | None = None

    @classmethod
    def of(cls, directory: Path, *overrides: str, **where: Any) -> Self:
        """What `in_process` makes of them."""
        return cls(directory, in_process(directory, *overrides, **where))

    @property
    def out(self) -> Path:
        return self.directory / "out"

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        """By step."""
        return {record["step"]: record for record in read_metrics(self.out / "metrics.jsonl")}

    @property
    def reports(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.out / "sync_reports.jsonl").read_text().splitlines()]

    @property
    def timeline(self) -> list[Span]:
        return read_spans(self.out / "timeline.jsonl")

    def spans(self, role: str, name: str, version: int | None = None) -> list[Span]:
        """Of one version, or of any."""
        found = [span for span in self.timeline if (span.role, span.name) == (role, name)]
        return [span for span in found if version in (None, span.version)]

    def samples(self, step: int, kind: str = "samples") -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.directory / kind / f"{step}.jsonl").read_text().splitlines()]

    def questions(self, step: int) -> list[str]:
        """The prompts of a step, in the order in which the data gave them."""
        return list(dict.fromkeys(sample["prompt"][-1]["content"] for sample in self.samples(step)))


# -- the real thing ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The command line, vLLM, the built-in model, two FSDP2 ranks."""
    directory = tmp_path_factory.mktemp("real")
    with Job(
        directory,
        "trainer.device=cpu",
        "trainer.total_training_steps=3",
        "trainer.test_freq=2",
        "trainer.save_freq=2",
        "data.train_batch_size=8",
        "data.val_max_samples=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
    ) as job:
        code = job.wait()
        left = job.left()
    assert code == 0, job.stderr
    assert left == []
    return Run(directory), job


@pytest.mark.vllm
def test_vllm_has_the_trainers_weights_on_every_step(real):
    run, _ = real
    assert list(run.metrics) == [0, 1, 2, 3]
    trained = [metrics for step, metrics in run.metrics.items() if step]
    assert max(metrics["training/rollout_probs_diff_mean"] for metrics in trained) < 0.02
    assert min(metrics["training/rollout_actor_probs_pearson_corr"] for metrics in trained) > 0.98
    assert all(metrics["actor/grad_norm"] > 0 for metrics in trained)


@pytest.mark.vllm
def test_metrics_have_verls_names(real):
    run, _ = real
    for step in (1, 2, 3):
        wanted = [f"{group}/{name}" for group, names in EVERY_STEP.items() for name in names]
        assert [name for name in wanted if name not in run.metrics[step]] == []
    held_out = "val-core/builtin/arithmetic/acc/mean@1"
    assert [step for step, metrics in run.metrics.items() if held_out in metrics] == [0, 2, 3]
    assert "timing_s/testing" in run.metrics[2]
    assert [step for step, metrics in run.metrics.items() if "timing_s/save_checkpoint" in metrics] == [2, 3]


@pytest.mark.vllm
def test_every_sync_leaves_a_report_whose_phases_add_up(real):
    run, _ = real
    assert [(report["version"], report["outcome"]) for report in run.reports] == [
        (version, "committed") for version in range(4)
    ]
    for report in run.reports:
        assert sum(report["phase_s"].values()) == pytest.approx(report["total_s"])
        assert report["nbytes_moved"] == report["nbytes_needed"] > 0
        assert report["replicas_updated"] == ["replica-0"]
    for step in (1, 2, 3):
        assert run.metrics[step]["checkpoint_engine/total_s"] == pytest.approx(run.reports[step]["total_s"])


@pytest.mark.vllm
def test_the_console_shows_progress_steps_and_a_summary_and_no_noise(real):
    run, job = real
    slow = "warning: Ray was too slow to start"  # the machine is busy
    unboxed = [line for line in job.stderr.splitlines() if not line.startswith(("+-", "|", slow))]
    assert [line.split(" (")[0] for line in unboxed] == [
        f"training builtin:tiny-qwen2 on builtin:arithmetic; output in {run.out}",
        "rollout: vllm, 1 replicas of 1 ranks, colocated; 4 responses per prompt",
        "batch: 8 prompts per step, 4 per optimizer step, micro-batches of up to 16384 tokens; "
        "prompts of 64, responses of 16 tokens",
        "algorithm: grpo, loss vanilla",
        "starting Ray",
        "starting 2 trainer ranks on cpu",
        "starting 1 vllm rollout engine",
        re.search(r"started in [\d.]+ s", job.stderr)[0],
        "loading version 0 of the weights into the rollout engines",
        re.search(r"the training state of the last step is kept in memory: [\d.]+ MiB on [\d.]+", job.stderr)[0],
        *(f"checkpoint: {run.out / f'global_step_{step}'}" for step in (2, 3)),
        re.search(r"3 steps in \d+ s; to look at them: verl-sync report ", job.stderr)[0] + str(run.out),
    ]
    lines = job.stdout.splitlines()[:9]
    named = [line for line in lines if line.startswith("step ")]
    steps = [re.match(r"step (\d)/3 \| (reward|held-out builtin/arithmetic) \d", line).groups() for line in named]
    assert [step for step, what in steps if what == "reward"] == ["1", "2", "3"]
    assert [step for step, what in steps if what != "reward"] == ["0", "2", "3"]
    assert [line[:5] for line in lines if line not in named] == ["  kl "] * 3
    assert max(map(len, lines)) <= 80
    assert job.stderr.count("+- held-out sample, step ") == 3
    forms = {form(line) for line in (*job.stderr.splitlines(), *job.stdout.splitlines())}
    assert [line for line in shown("tests/e2e/test_training.py") if form(line[1]) not in forms] == []
    parts = [span for span in run.timeline if span.role == "trainer" and span.version is None]
    assert {"imports", "checks", "Ray", "trainer ranks", "models", "agent loops", "engines"} <= {p.name for p in parts}
    assert max(part.stop_s for part in parts) <= run.spans("trainer", "update_weights")[0].start_s
    assert "held-out reward" in job.stdout
    assert (run.out / "config.yaml").is_file()
    assert len((run.out / "runs.jsonl").read_text().splitlines()) == 1
    for name in ("metrics.jsonl", "sync_reports.jsonl", "tensorboard", "global_step_3"):
        assert str(run.out / name) in job.stdout
        assert (run.out / name).exists()
    assert list((run.out / "tensorboard").glob("events.out.tfevents.*"))


# -- rollouts on nodes of their own ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [using("kimi_ckpt_engine")])
def test_one_of_two_rollout_nodes_may_pull_the_weights_of_both(ray_cluster, tmp_path, backend):
    run = Run.of(
        tmp_path,
        f"checkpoint_engine.backend={backend}",
        "trainer.placement=separate",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.rollout.nnodes=2",
        # In bfloat16 trainer and engine round differently, by how much depends on the processor.
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    )
    assert [report["outcome"] for report in run.reports] == ["committed", "committed"]
    for report in run.reports:
        assert report["replicas_updated"] == ["replica-0", "replica-1"]
        assert 2 * report["nbytes_moved"] == 3 * report["nbytes_needed"] > 0  # the trainer's copy, and two nodes
    assert run.metrics[1]["training/rollout_probs_diff_max"] < 1e-5


# -- algorithms, with models and functions of the user's own ----------------------------------------------------------

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    # Says something about any text, so that there is always something to learn.
    return {"score": sum(solution_str.encode()) % 7 / 7 + bonus, "length": len(solution_str)}
"""


@pytest.fixture
def own_reward(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    return f"custom_reward_function.path={tmp_path / 'reward.py'}"


def test_rloo_with_a_kl_loss_entropy_token_weights_and_fixed_micro_batches_on_qwen3(ray_cluster, tmp_path, own_reward):
    model = make_tiny_model(tmp_path / "qwen3", "qwen3", tie_word_embeddings=True)
    run = Run.of(
        tmp_path,
        f"actor_rollout_ref.model.path={model}",
        own_reward,
        "+custom_reward_function.reward_kwargs.bonus=0.5",
        "algorithm.adv_estimator=rloo",
        "algorithm.rollout_correction.rollout_is=token",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_type=mse",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=true",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
        "trainer.total_training_steps=2",
        f"trainer.rollout_data_dir={tmp_path / 'samples'}",
        f"trainer.validation_data_dir={tmp_path / 'held-out'}",
    )
    first, second = run.metrics[1], run.metrics[2]
    assert first["actor/kl_loss"] > 0  # the second of its epochs has left the reference already
    assert second["actor/kl_loss"] > 0
    assert second["actor/ppo_kl"] != 0
    assert first["actor/entropy"] / 4 == pytest.approx(math.log(VOCAB_SIZE), abs=0.2)  # four tokens, nearly uniform
    assert 0.98 < first["rollout_corr/rollout_is_mean"] < 1.02
    assert first["critic/score/min"] >= 0.5
    assert first["reward_extra/length/mean"] > 0
    assert first["training/rollout_probs_diff_mean"] < 0.02

    samples = run.samples(1)
    for sample in samples:
        count = len(sample["response_ids"])
        assert sample["versions"] == [0] * count
        assert sample["replicas"] == [["replica-0", 0, count]]
        assert len(sample["log_probs"]) == count > 0
    assert len(samples) == 4 * 2
    assert samples[0].keys() >= {"step", "uid", "prompt", "response", "ground_truth", "score"}
    for sample in samples:
        assert sample["score"] == pytest.approx(sum(sample["response"].encode()) % 7 / 7 + 0.5, abs=1e-6)
    assert len({sample["uid"] for sample in samples}) == 4
    assert len(run.samples(2, "held-out")) == 4
    assert run.result.rewards_after == {"builtin/arithmetic": pytest.approx(_mean_score(run.samples(2, "held-out")))}


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(("actor_rollout_ref.actor.strategy=fsdp",), id="fsdp1"),
        pytest.param(
            (
                "actor_rollout_ref.actor.strategy=megatron",
                "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            ),
            id="megatron",
        ),
    ],
)
def test_the_default_algorithm_on_other_engines_with_a_reference_policy(
    ray_cluster, tmp_path, tiny_model, own_reward, strategy
):
    run = Run.of(
        tmp_path,
        f"actor_rollout_ref.model.path={tiny_model}",
        own_reward,
        *strategy,
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    )
    assert list(run.metrics) == [1, 2]
    assert max(metrics["training/rollout_probs_diff_mean"] for metrics in run.metrics.values()) < 0.02
    assert all(metrics["actor/grad_norm"] > 0 for metrics in run.metrics.values())
    assert run.metrics[1]["actor/kl_loss"] == 0  # not a step away from the reference yet
    assert run.metrics[2]["actor/kl_loss"] > 0
    assert [(report["version"], report["outcome"]) for report in run.reports] == [
        (version, "committed") for version in range(3)
    ]
    assert all(report["nbytes_moved"] == report["nbytes_needed"] > 0 for report in run.reports)
    trained = AutoModelForCausalLM.from_pretrained(run.out / "global_step_2/actor/huggingface")
    start = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert not torch.equal(trained.lm_head.weight, start.lm_head.weight)


CRITIC = ("algorithm.adv_estimator=gae", "algorithm.lam=0.95", "trainer.critic_warmup=1", "trainer.save_freq=2")


def test_ppo_with_a_critic_that_warms_up_and_is_saved_and_resumed(ray_cluster, tmp_path, tiny_model, own_reward):
    overrides = (
        f"actor_rollout_ref.model.path={tiny_model}",
        own_reward,
        *CRITIC,
        "critic.ppo_mini_batch_size=2",
        "critic.optim.lr=1e-3",
        "actor_rollout_ref.actor.optim.lr=1e-3",
    )
    run = Run.of(tmp_path, *overrides, "trainer.total_training_steps=2")
    first, second = run.metrics[1], run.metrics[2]
    assert "actor/grad_norm" not in first  # only the critic learns
    assert second["actor/grad_norm"] > 0
    assert first["critic/values/max"] == first["critic/values/min"] == 0.0  # the head starts at zero
    assert second["critic/values/max"] > second["critic/values/min"]
    for metrics in (first, second):
        names = ("vf_loss", "vf_clipfrac", "vpred_mean", "vf_explained_var", "grad_norm", "lr")
        assert [name for name in names if f"critic/{name}" not in metrics] == []
        assert metrics["critic/grad_norm"] > 0
        assert metrics["timing_s/values"] > 0
        assert metrics["timing_s/update_critic"] > 0
    in_process(tmp_path, *overrides, "trainer.total_training_steps=3")
    assert list(run.metrics) == [1, 2, 3]
    assert run.metrics[3]["critic/values/max"] > run.metrics[3]["critic/values/min"]  # a new head would give zeros
    assert (run.out / "global_step_3/critic/.metadata").exists()


LOOP = """
import itertools

from verl.experimental.agent_loop import BaseTool, ToolAgentLoop
from verl.interactions import BaseInteraction

class Add(BaseTool):
    properties = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties}
    schema = {"type": "function", "function": {"name": "add", "parameters": parameters}}

    async def execute(self, arguments):
        return f"sum {arguments['a'] + arguments['b']}"

CALL = "<tool_call><function=add><parameter=a>40</parameter><parameter=b>2</parameter></function></tool_call>"

class EverySecond:
    '''A random model calls no tools; this reads CALL in the place of every second of its messages, of all samples.'''

    turns = itertools.cycle([CALL, None])

    def __init__(self, parser):
        self.parser = parser

    def __getattr__(self, name):
        return getattr(self.parser, name)

    async def calls(self, responses_ids, schemas):
        call = next(self.turns)
        return await self.parser.calls(self.parser.tokenizer.encode(call) if call else responses_ids, schemas)

class Again(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return False, kwargs["words"], 0.25, {}

class Calling(ToolAgentLoop):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.parser = EverySecond(self.parser)
"""
DATASET = """
from verl.utils.dataset.rl_dataset import RLHFDataset

class Polite(RLHFDataset):
    def __getitem__(self, position):
        item = super().__getitem__(position)
        partner = {"extra_info": {"interaction_kwargs": {"name": "again", "words": "once more"}}}
        prompt = "please " + item["raw_prompt"][0]["content"]
        return item | partner | {"raw_prompt": [{"role": "user", "content": prompt}]}
"""


@pytest.mark.vllm
def test_tools_called_in_a_format_of_vllm_an_interaction_a_loop_and_a_data_set_of_the_users_own(
    ray_cluster, tmp_path, tiny_model, own_reward
):
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "dataset.py").write_text(DATASET)
    (tmp_path / "tools.yaml").write_text(f"tools: [{{class_name: '{tmp_path / 'loop.py'}:Add'}}]\n")
    (tmp_path / "partners.yaml").write_text(f"interaction: [{{class_name: '{tmp_path / 'loop.py'}:Again'}}]\n")
    (tmp_path / "loops.yaml").write_text(f"- {{name: calling, _target_: '{tmp_path / 'loop.py'}:Calling'}}\n")
    run = Run.of(
        tmp_path,
        f"actor_rollout_ref.model.path={tiny_model}",
        own_reward,
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=1",
        "data.max_prompt_length=302",
        "data.max_response_length=210",
        f"data.custom_cls.path={tmp_path / 'dataset.py'}",
        "data.custom_cls.name=Polite",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path / 'tools.yaml'}",
        "actor_rollout_ref.rollout.multi_turn.format=qwen3_coder",
        f"actor_rollout_ref.rollout.multi_turn.interaction_config_path={tmp_path / 'partners.yaml'}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=calling",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
        f"trainer.rollout_data_dir={tmp_path / 'samples'}",
    )
    assert run.metrics[1]["num_turns/max"] > 2
    assert run.metrics[1]["training/rollout_probs_diff_mean"] < 0.02
    samples = run.samples(1)
    assert all(sample["prompt"][0]["content"].startswith("please ") for sample in samples)
    assert any("sum 42" in sample["response"] for sample in samples)
    assert any("once more" in sample["response"] for sample in samples)


# -- checkpoints ------------------------------------------------------------------------------------------------------

STEPS = 4


@pytest.fixture(scope="module")
def repeatable(tmp_path_factory):
    """Overrides of a run whose every number is decided by its seed: greedy, float32, a reward that varies."""
    directory = tmp_path_factory.mktemp("repeatable")
    model = make_tiny_model(directory / "llama", "llama")
    (directory / "reward.py").write_text(REWARD)
    return (
        f"actor_rollout_ref.model.path={model}",
        f"custom_reward_function.path={directory / 'reward.py'}",
        *STATEFUL,
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.ref.fsdp_config.dtype=float32",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.do_sample=false",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
    )


@pytest.fixture(scope="module")
def uninterrupted(ray_cluster, tmp_path_factory, repeatable):
    directory = tmp_path_factory.mktemp("uninterrupted")
    contents = "[model,optimizer,extra,hf_model]"
    result = in_process(
        directory,
        *repeatable,
        "trainer.max_actor_ckpt_to_keep=2",
        f"actor_rollout_ref.actor.checkpoint.save_contents={contents}",
        f"trainer.rollout_data_dir={directory / 'samples'}",
    )
    return Run(directory, result)


@pytest.fixture(scope="module")
def killed(warm, tmp_path_factory, repeatable):
    """A run that is killed after its second step: its directory, its command, what was there and what is left."""
    directory = tmp_path_factory.mktemp("resumed")
    overrides = (*repeatable, f"trainer.rollout_data_dir={directory / 'samples'}")
    with Job(directory, *QUICK, *overrides, warm=warm) as job:
        job.wait_for_checkpoint(2)
        there = {
            title: len(job.find(title)) for title in ("ray::RolloutServer", "ray::CheckpointEngineWorker", "ray::")
        }
        job.driver.kill()
        job.wait()
        left = job.left()
    return directory, overrides, there, left


def test_a_killed_driver_takes_every_process_and_its_shared_memory_along(killed):
    _, _, there, left = killed
    assert there["ray::RolloutServer"] == there["ray::CheckpointEngineWorker"] == 1
    assert there["ray::"] >= 4, "and two trainer ranks, whose titles change with what they do"
    assert left == []


@pytest.fixture(scope="module")
def resumed(ray_cluster, killed):
    """The same command again."""
    directory, overrides, _, _ = killed
    (directory / "out/.global_step_9.partial/actor").mkdir(parents=True)  # as a kill during a save leaves it
    return Run.of(directory, *overrides)


def test_a_killed_run_goes_on_where_its_last_checkpoint_was(uninterrupted, resumed):
    assert [step for step in resumed.metrics if step > 2] == [3, 4]
    for step in range(1, STEPS + 1):
        assert resumed.questions(step) == uninterrupted.questions(step)
        for name in (
            "critic/score/mean",
            "critic/rewards/mean",
            "actor/grad_norm",
            "actor/lr",
            "actor/pg_loss",
            "actor/reward_kl_penalty_coeff",
        ):
            expected = uninterrupted.metrics[step][name]
            assert resumed.metrics[step][name] == pytest.approx(expected, rel=1e-3, abs=1e-6), (step, name)
    assert resumed.result.step == STEPS


def test_the_run_before_the_kill_keeps_its_place_in_the_metrics(resumed):
    assert list(resumed.metrics) == [1, 2, 3, 4]


def test_each_sync_and_each_span_of_the_timeline_is_told_once_after_a_resume(resumed):
    assert [report["version"] for report in resumed.reports] == list(range(STEPS + 1))
    for role, name in (("trainer", "step"), ("trainer", "gen"), ("trainer", "update_weights"), ("sync", "stage")):
        told = [span.version for span in resumed.spans(role, name)]
        assert told == list(range(0 if name in ("update_weights", "stage") else 1, STEPS + 1)), (role, name)


def test_only_as_many_checkpoints_as_configured_are_kept(uninterrupted, resumed):
    assert sorted(path.name for path in uninterrupted.out.glob("global_step_*")) == ["global_step_3", "global_step_4"]
    assert len(list(resumed.out.glob("global_step_*"))) == STEPS


def test_the_hugging_face_export_loads_in_transformers(uninterrupted):
    directory = uninterrupted.out / "global_step_4/actor/huggingface"
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer("1+1=", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(ids).logits).all()
    assert model.config.model_type == "llama"


def test_val_only_validates_the_checkpoint_that_it_is_given_and_trains_nothing(
    ray_cluster, tmp_path, repeatable, uninterrupted
):
    result = in_process(
        tmp_path,
        *repeatable,
        "trainer.n_gpus_per_node=1",
        "trainer.val_only=true",
        "trainer.val_before_train=true",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={uninterrupted.out / 'global_step_4'}",
        f"trainer.validation_data_dir={tmp_path / 'held-out'}",
    )
    run = Run(tmp_path, result)
    assert result.step == STEPS
    assert list(run.metrics) == [STEPS]
    assert result.rewards_after == uninterrupted.result.rewards_after
    assert not list(run.out.glob("global_step_*"))


def _mean_score(samples):
    return sum(sample["score"] for sample in samples) / len(samples)
