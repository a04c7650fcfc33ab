"""Environments of the package verifiers, of one turn and of several, run by an interpreter that has it."""

import asyncio
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.experimental.agent_loop.scripted_manager import ScriptedManager
from verl.experimental.agent_loop import AgentLoopManager, agent_program
from verl.experimental.agent_loop.base import DictConfigWrap
from verl.experimental.agent_loop.errors import AgentSetupError
from verl.experimental.agent_loop.registry import LoopEntry, check_loop, known_loops, loop_factory
from verl.trainer.config.loader import load_config
from verl.trainer.ppo.data import require_rewards
from verl.utils.builtin.tokenizer import build_tokenizer
from verl.utils.config import ConfigError
from verl.utils.data import main
from verl.utils.dataset.files import Rows
from verl.workers.rollout.records import SamplingOptions

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv/verifiers/bin/python"
PYTHON_OF_TASKS = ROOT / ".venv/verifiers-0.4/bin/python"
LOOP = "verl.experimental.agent_loop.verifiers_agent:VerifiersAgentLoop"
FOUND = f"{ROOT}/examples/environments:{Path(__file__).parent}"
FAILURES = {
    "crash": "the environment failed: RuntimeError: the sandbox is gone",
    "exit": "the environment failed: SystemExit: no license",
    "nan": "the environment gave the reward nan",
    "no reward": "the environment failed: Error calling reward function lies: float()",
    "hang": "did not end within timeout_s=5",
    "process": "did not end within timeout_s=5",
    "block": "did not end within timeout_s=5",
    "late": "the environment does not end what is over: its process ends",
}
"""What a sample does that is so called, and what becomes of it."""
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
DEADLINES = {"hang": 5.0, "process": 5.0, "block": 5.0}


class Ran:
    """The samples of one environment, all in one process: it takes seconds to import."""

    def __init__(self, folder):
        self.tokenizer = build_tokenizer()
        self.config = load_config(["data.max_prompt_length=2000"])
        self.loops = known_loops(str(folder / "agents.yaml"))
        files = [folder / f"{split}.parquet" for split in ("train", "test")]
        read = [Rows([file], ["prompt", "agent_name", "extra_info", "reward_model"]) for file in files]
        self.rows = [row for rows in read for row in rows.read(0, len(rows))]
        self.managers, self.outputs, self.warnings = {}, {}, {}

    def row(self, text, truth=None):
        return next(
            row
            for row in self.rows
            if text in row["prompt"][-1]["content"] and truth in (None, row["reward_model"]["ground_truth"])
        )

    async def run(self, name, row, *texts, **changes):
        self.managers[name] = manager = ScriptedManager(self.tokenizer, *texts)
        loop = loop_factory(row["agent_name"], self.loops)(
            trainer_config=DictConfigWrap(self.config), server_manager=manager, tokenizer=self.tokenizer
        )
        loop.timeout_s = DEADLINES.get(name, 600.0)
        info = {**row["extra_info"], **changes}
        try:
            sampling = SamplingOptions(max_tokens=2000).as_dict()
            self.outputs[name] = await loop.run(sampling, raw_prompt=row["prompt"], extra_info=info)
        except Exception as exc:  # noqa: BLE001 - a test compares it
            self.outputs[name] = exc

    async def run_all(self):
        guess, total = self.row("Guess it"), self.row("=?")
        number, right = int(guess["reward_model"]["ground_truth"]), total["reward_model"]["ground_truth"]
        try:
            await asyncio.gather(
                self.run("guess", guess, "0", "none", str(number)),
                self.run("sum", total, right),
                self.run("calling", self.row("Call add."), CALL, "3"),
                self.run("chatter", self.row("do chatter"), "3"),
                self.run("another", guess, digest="0"),
                self.run("beyond", guess, index=99),
                *(self.run(f"guess {n}", guess, *("0 " * n for n in [n] * n), str(number)) for n in range(3)),
            )
            told = ("crash", "exit", "nan", "no reward", "hang", "process")
            await asyncio.gather(*(self.run(each, self.row(f"do {each}"), "3") for each in told))
            await asyncio.gather(self.run("block", self.row("do block")), self.run("late", self.row("do late"), "3"))
        finally:
            await agent_program.close_programs()


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
    if not PYTHON.exists():
        pytest.skip("verifiers is not installed: make environments")
    folder = tmp_path_factory.mktemp("data")
    arguments = json.dumps({"told": [*FAILURES, "chatter", "last"]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", FOUND)
        command = ["prepare", "verifiers", "--environment", "unruly_environment", "--python", str(PYTHON)]
        assert main([*command, "--arguments", arguments, "--to", str(folder)]) == 0
        found = Ran(folder)
        check_loop("verifiers/unruly_environment", found.loops)
        with pytest.MonkeyPatch.context() as also:
            warnings = []
            also.setattr(
                "verl.experimental.agent_loop.openai_agent.logger.warning", lambda *args: warnings.append(args)
            )
            asyncio.run(found.run_all())
    found.warnings = [str(failure) for _, failure in warnings]
    return found


def test_the_trainer_scores_what_the_engine_sampled_in_several_turns(environments):
    output, prompts = environments.outputs["guess"], environments.managers["guess"].prompts
    number = environments.row("Guess it")["reward_model"]["ground_truth"]
    said = ["0", "none", number]
    chat = [*environments.row("Guess it")["prompt"]]
    for answer, reply in zip(said, ["Higher.", "Say a number.", None], strict=True):
        assert prompts.pop(0) == environments.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": reply}]
    sampled = [
        token for text in said for token in (*environments.tokenizer.encode(text), environments.tokenizer.eos_token_id)
    ]
    mine = [number for number, mask in enumerate(output.response_mask) if mask]
    assert [output.response_ids[number] for number in mine] == sampled
    assert {output.response_logprobs[number] for number in mine} == {-0.5}
    assert sorted({output.response_versions[number] for number in mine}) == [1, 2, 3]
    assert output.reward_score == pytest.approx(1 / 3)


def test_rewards_and_metrics_are_those_of_the_environment(environments):
    total = environments.row("=?")["reward_model"]["ground_truth"]
    assert environments.outputs["sum"].reward_score == 1.0
    assert environments.outputs["sum"].numbers["environment/length"] == len(total)
    assert environments.outputs["guess"].numbers["environment/num_turns"] == 3.0
    assert environments.outputs["chatter"].reward_score == 1.0


def test_tools_of_the_environment_are_called(environments):
    output = environments.outputs["calling"]
    read = environments.tokenizer.decode(
        [token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if not mask]
    )
    assert (output.reward_score, "3" in read, "add" in environments.tokenizer.decode(output.prompt_ids)) == (
        1,
        True,
        True,
    )


def test_many_samples_at_once_do_not_mix(environments):
    for number in range(3):
        assert environments.outputs[f"guess {number}"].reward_score == pytest.approx(1 / (number + 1))


@pytest.mark.parametrize("name", FAILURES)
def test_what_fails_in_a_sample_is_named_counted_and_ends_that_sample(environments, name):
    output = environments.outputs[name]
    assert (output.reward_score, output.metrics["agent_failed"]) == (0.0, 1.0)
    assert any(FAILURES[name] in each for each in environments.warnings), environments.warnings


def test_a_sample_of_other_data_ends_the_run(environments):
    for name, message in {"another": "sample 0 of train is another one", "beyond": "no sample 99 of 'train'"}.items():
        assert isinstance(environments.outputs[name], AgentSetupError)
        assert message in str(environments.outputs[name])


def test_nothing_of_the_program_is_left(environments):
    def is_left(process):
        with contextlib.suppress(psutil.Error):
            return "654.3" in process.cmdline() or "unruly_environment" in " ".join(process.cmdline())
        return False

    assert not [process for process in psutil.process_iter() if is_left(process)]


@pytest.mark.job
def test_tasks_of_verifiers_0_4_run_in_its_harness(tmp_path, monkeypatch):
    if not PYTHON_OF_TASKS.exists():
        pytest.skip("no .venv/verifiers-0.4 with verifiers 0.4 and uv, which downloads its harness")
    monkeypatch.setenv("PYTHONPATH", FOUND)
    command = ["prepare", "verifiers", "--environment", "tasks_environment", "--python", str(PYTHON_OF_TASKS)]
    assert main([*command, "--to", str(tmp_path)]) == 0
    found = Ran(tmp_path)

    async def run_all():
        try:
            await asyncio.gather(*(found.run(n, found.row(f"{n}+1=?"), "1") for n in range(5)))
        finally:
            await agent_program.close_programs()

    asyncio.run(run_all())
    assert [found.outputs[n].reward_score for n in range(5)] == [1, 0, 0, 0, 0]
    assert [found.outputs[n].metrics["agent_failed"] for n in range(5)] == [0, 0, 0, 1, 1]
    first = found.outputs[0]
    assert (first.numbers["environment/length"], first.numbers["environment/reward/right"]) == (1, 1)
    assert first.response_ids == [*found.tokenizer.encode("1"), found.tokenizer.eos_token_id]
    (prompt,) = found.managers[0].prompts
    assert (
        prompt
        == first.prompt_ids
        == found.tokenizer.apply_chat_template(
            [{"role": "user", "content": "0+1=?"}], add_generation_prompt=True, return_dict=False
        )
    )


def test_samples_that_an_environment_rewards_need_no_rule(tmp_path):
    (tmp_path / "agents.yaml").write_text(f"- {{name: verifiers/a, _target_: '{LOOP}', environment: a}}")
    agent = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path}/agents.yaml"
    source = SimpleNamespace(count=2, first="row 0", without_truth=2, agents={"verifiers/a"})
    data = SimpleNamespace(sources={"verifiers/a": source})
    require_rewards(load_config([agent]), data, AgentLoopManager)
    source.agents.add(None)
    with pytest.raises(ConfigError, match="no built-in reward for data_source='verifiers/a', which 2 samples have"):
        require_rewards(load_config([agent]), data, AgentLoopManager)


WRONG = {
    "needs environment, the name": {},
    "arguments=\\[\\] is no mapping": {"environment": "a", "arguments": []},
    "python=/none is not there.*two commands make one: python -m venv": {"environment": "a", "python": "/none"},
    "has no package verifiers.*\\.venv-verifiers/bin/pip install .*a_b": {"environment": "o/a_b"},
    "unknown 'enviroment'. Did you mean 'environment'": {"enviroment": "a"},
    "timeout_s=0 is not": {"environment": "a", "timeout_s": 0},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_are_errors_on_the_driver(message, monkeypatch):
    if "timeout_s" in message:
        monkeypatch.setattr("verl.utils.environments.source.Source.check", lambda *_: None)
    with pytest.raises(ConfigError, match=message):
        check_loop("mine", {"mine": LoopEntry(LOOP, WRONG[message])})
