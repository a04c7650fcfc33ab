"""Environments behind a real server of OpenEnv."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experimental.agent_loop.scripted_manager import ScriptedManager
from verl.experimental.agent_loop.base import DictConfigWrap
from verl.experimental.agent_loop.errors import AgentCodeError, AgentSetupError
from verl.experimental.agent_loop.registry import LoopEntry, check_loop, loop_factory
from verl.trainer.config.loader import load_config
from verl.utils.builtin.tokenizer import build_tokenizer
from verl.utils.config import ConfigError
from verl.workers.rollout.records import SamplingOptions

PACKAGES = Path(__file__).parents[3] / ".venv/openenv"
SERVER = Path(__file__).with_name("openenv_server.py")
LOOP = "verl.experimental.agent_loop.openenv_agent:OpenEnvAgentLoop"
PROMPT = {"role": "user", "content": "Say a number."}
TOKENIZER = build_tokenizer()


@pytest.fixture(scope="module")
def server():
    """Its address and process. It has two sessions."""
    if not PACKAGES.is_dir():
        pytest.skip("OpenEnv is not installed: make environments")
    environment = os.environ | {"PYTHONPATH": str(PACKAGES)}
    command = [sys.executable, str(SERVER), "2"]
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", process
        finally:
            process.kill()


def loop_of(url, manager, **options):
    entry = LoopEntry(LOOP, {"url": url, "action": "message", "observation": "text", **options})
    check_loop("game", {"game": entry})
    return loop_factory("game", {"game": entry})(
        trainer_config=DictConfigWrap(load_config(["data.max_prompt_length=2000"])),
        server_manager=manager,
        tokenizer=TOKENIZER,
    )


async def played(url, *answers, room=2000, reset=None, **options):
    """The output of a sample, and the policy's prompts."""
    manager = ScriptedManager(TOKENIZER, *answers)
    loop = loop_of(url, manager, **options)
    sampling = SamplingOptions(max_tokens=room).as_dict()
    output = await loop.run(sampling, raw_prompt=[PROMPT], extra_info={"reset": reset or {}})
    return output, [TOKENIZER.decode(each) for each in manager.prompts]


def test_an_episode_goes_on_until_it_is_done_and_its_rewards_are_added_up(server):
    output, prompts = asyncio.run(played(server[0], "2", "9", "7", reset={"number": 7}))
    assert output.reward_score == pytest.approx(-0.25 - 0.25 + 1.0)
    assert output.numbers["environment/turns"] == 3
    assert output.numbers["environment/done"] == 1
    assert "Say a number.\n\nFind a number up to 14." in prompts[0]
    assert [text in prompt for text, prompt in zip(("Find", "higher", "lower"), prompts, strict=True)] == [True] * 3
    sampled = [token for text in ("2", "9", "7") for token in (*TOKENIZER.encode(text), TOKENIZER.eos_token_id)]
    assert [token for token, own in zip(output.response_ids, output.response_mask, strict=True) if own] == sampled


def test_the_policy_may_see_all_that_the_environment_shows(server):
    _, prompts = asyncio.run(played(server[0], "2", "5", observation=None))
    assert '"text": "higher"' in prompts[1]
    assert '"tries": 1' in prompts[1]


def test_an_episode_ends_after_its_turns_and_with_the_room_of_its_conversation(server):
    output, _ = asyncio.run(played(server[0], "1", "2", "3", max_turns=2))
    assert (output.reward_score, output.numbers["environment/done"]) == (-0.5, 0)
    output, _ = asyncio.run(played(server[0], "1", "2", "3", room=12))
    turns = output.numbers["environment/turns"]
    assert (output.reward_score, output.stop_reason, turns < 3) == (-0.25 * turns, "length", True)


def test_samples_beyond_the_sessions_of_the_server_wait_for_them(server):
    async def many():
        return await asyncio.gather(*(played(server[0], "1", "5") for _ in range(5)))

    assert [output.reward_score for output, _ in asyncio.run(many())] == [0.75] * 5


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("crash", "the environment failed in step: .*the board is gone"),
        ("hang", "did not end within timeout_s=2"),
        ("no number", "the environment gave the reward 'much'"),
    ],
)
def test_a_failure_of_the_environment_is_the_samples_alone(server, trouble, said):
    options = {"reset": {"trouble": trouble}, "timeout_s": 2.0 if trouble == "hang" else 60.0}
    with pytest.raises(AgentCodeError, match=said):
        asyncio.run(played(server[0], "1", "2", on_failure="raise", **options))
    output, _ = asyncio.run(played(server[0], "1", "2", **options))
    assert (output.reward_score, output.numbers["agent_failed"]) == (0.0, 1.0)


def test_a_field_that_the_environment_does_not_show_ends_the_run(server):
    with pytest.raises(AgentSetupError, match="shows no field 'board', but .*text"):
        asyncio.run(played(server[0], "1", observation="board"))


def test_a_server_that_is_not_there_ends_the_run():
    with pytest.raises(AgentSetupError, match=r"no server of OpenEnv answers at ws://127\.0\.0\.1:9/ws"):
        asyncio.run(played("http://127.0.0.1:9", "1", connect_s=0.1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "127.0.0.1:8000"}, "url='127.0.0.1:8000': is no address like http://host:8000"),
        ({"action": None}, "needs action, a text"),
        ({"max_turns": 0}, "max_turns=0 is no number from 1 on"),
        ({"timeout_s": -1}, "timeout_s=-1 is not a positive number"),
        ({"on_failure": "ignore"}, "on_failure='ignore' is none of raise, zero"),
        ({"max_turn": 3}, "unknown 'max_turn'. Did you mean 'max_turns'"),
    ],
)
def test_options_are_checked_before_work_starts(options, said):
    with pytest.raises(ConfigError, match=said):
        loop_of(**{"url": "http://127.0.0.1:9", "manager": None} | options)


def test_a_server_that_ends_is_the_samples_failure(server):
    url, process = server
    with pytest.raises(AgentCodeError, match="the environment ended in step"):
        asyncio.run(played(url, "1", reset={"trouble": "exit"}, on_failure="raise"))
    assert process.wait(60) == 3
