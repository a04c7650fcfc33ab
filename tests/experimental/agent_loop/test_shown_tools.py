"""The driver counts prompts as the agents send them."""

import asyncio
import json

import pytest

from tests.experimental.agent_loop.fakes import AddTool
from verl.experimental.agent_loop.base import DictConfigWrap
from verl.experimental.agent_loop.manager import AgentLoopManager
from verl.experimental.agent_loop.tool_loop import ToolAgentLoop
from verl.trainer.config.loader import load_config
from verl.trainer.ppo.data import build_dataloaders
from verl.utils.builtin.tokenizer import build_tokenizer
from verl.utils.config import ConfigError

FAKES = "tests.experimental.agent_loop.fakes"
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


@pytest.fixture
def overrides(tmp_path):
    """Of a job with a tool, and with samples of three agents, two of which show it."""
    (tmp_path / "tools.yaml").write_text(f"tools: [{{class_name: {FAKES}:AddTool}}]")
    rows = [
        {
            "data_source": "builtin/arithmetic",
            "prompt": [{"role": "user", "content": "1+1="}],
            "reward_model": {"ground_truth": "2"},
            "agent_name": name,
        }
        for name in ("single_turn_agent", "tool_agent", None)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        f"data.train_files={tmp_path / 'data.jsonl'}",
        f"data.val_files={tmp_path / 'data.jsonl'}",
        "data.train_batch_size=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "data.max_prompt_length=500",
        "data.shuffle=false",
        f"{MULTI_TURN}.enable=true",
        f"{MULTI_TURN}.tool_config_path={tmp_path / 'tools.yaml'}",
    ]


def items_of(config, tokenizer):
    loaders = build_dataloaders(config, tokenizer, AgentLoopManager)
    return [loaders["train"].dataset[index] for index in range(len(loaders["train"].dataset))]


def test_agents_show_their_own_tools(overrides):
    config = load_config(overrides)
    assert AgentLoopManager.shown_tools(config, "single_turn_agent") == ()
    assert AgentLoopManager.shown_tools(config, "tool_agent") == [AddTool.schema]
    assert AgentLoopManager.shown_tools(config, None) == [AddTool.schema]
    with pytest.raises(ConfigError, match="unknown agent loop 'tool_agnt'. Did you mean 'tool_agent'"):
        AgentLoopManager.shown_tools(config, "tool_agnt")


def test_what_is_counted_is_what_is_sent(overrides, tokenizer):
    config = load_config(overrides)
    single, tool, default = items_of(config, tokenizer)
    loop = ToolAgentLoop(trainer_config=DictConfigWrap(config), server_manager=None, tokenizer=tokenizer)
    sent = asyncio.run(loop.prompt_tokens(tool, ToolAgentLoop.shown_tools(config)))
    assert tool["prompt_ids"] == default["prompt_ids"] == sent
    assert single["prompt_ids"] == asyncio.run(loop.prompt_tokens(single))
    assert len(sent) > len(single["prompt_ids"])


def test_a_chat_template_that_an_agent_cannot_use_is_told_before_anything_starts(overrides):
    config, tokenizer = load_config(overrides), build_tokenizer()
    tokenizer.chat_template = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="line 2 of .*does not show messages of role 'tool'; set actor_rollout_ref"):
        build_dataloaders(config, tokenizer, AgentLoopManager)


def test_a_prompt_that_only_fits_without_its_tools_is_found_before_anything_starts(overrides, tokenizer):
    longest = len(items_of(load_config(overrides), tokenizer)[1]["prompt_ids"])
    short = [*overrides, f"data.max_prompt_length={longest - 1}"]
    with pytest.raises(ConfigError, match=rf"2 of 3 train prompts .*\(longest {longest}, first in line 2 of"):
        build_dataloaders(load_config(short), tokenizer, AgentLoopManager)
    kept = items_of(load_config([*short, "data.filter_overlong_prompts=true"]), tokenizer)
    assert [item["agent_name"] for item in kept] == ["single_turn_agent"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_source": "my/sums"}, "line 4 of .*no built-in reward for data_source='my/sums', which 1 samples have"),
        ({"reward_model": {"ground_truth": ""}}, "line 4 of .*ground_truth is empty in 1 of the 4 samples"),
        ({"reward_model": None}, "line 4 of .*ground_truth is empty in 1 of the 4 samples"),
        ({"agent_name": "tool_agnt"}, "line 4 of .*unknown agent loop 'tool_agnt'"),
    ],
)
def test_a_row_that_this_job_cannot_use_is_named(overrides, tokenizer, tmp_path, change, message):
    file = tmp_path / "data.jsonl"
    row = json.loads(file.read_text().splitlines()[0]) | change
    file.write_text(file.read_text() + "\n" + json.dumps(row))
    with pytest.raises(ConfigError, match=message):
        build_dataloaders(load_config(overrides), tokenizer, AgentLoopManager)


def test_with_a_reward_function_of_ones_own_any_source_will_do(overrides, tokenizer, tmp_path, caplog):
    file = tmp_path / "data.jsonl"
    file.write_text(file.read_text().replace("builtin/arithmetic", "my/sums").replace('"2"', '""'))
    (tmp_path / "reward.py").write_text("def compute_score(**_): return 1.0\n")
    config = load_config([*overrides, f"custom_reward_function.path={tmp_path / 'reward.py'}"])
    assert len(items_of(config, tokenizer)) == 3
    assert "ground_truth is empty in all train samples" in caplog.text
