"""A partner that answers the policy's messages, as it is written for verl."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.experimental.agent_loop.scripted_manager import ScriptedManager
from tests.experimental.agent_loop.templates import FAMILIES, tokenizer_of
from tests.experimental.agent_loop.test_tool_loop import CALL, inserted
from verl.experimental.agent_loop import AgentLoopError, AgentLoopManager, ToolAgentLoop
from verl.experimental.agent_loop.base import DictConfigWrap
from verl.experimental.agent_loop.tool_answers import ToolThread
from verl.interactions.base import BaseInteraction
from verl.interactions.gsm8k_interaction import Gsm8kInteraction
from verl.interactions.utils.interaction_registry import initialize_interactions_from_config
from verl.trainer.config.loader import load_config
from verl.utils.config import ConfigError
from verl.workers.rollout.records import SamplingOptions

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
PROMPT = [{"role": "user", "content": "1+2?"}]


class Recorded(BaseInteraction):
    """Repeats what it hears, until it hears "bye"; keeps what it was asked."""

    def __init__(self, config):
        super().__init__(config)
        self.calls, self.ended = [], []

    async def start_interaction(self, instance_id=None, **kwargs):
        self.calls.append(("start", kwargs))
        return f"own-{instance_id}"

    async def generate_response(self, instance_id, messages, **kwargs):
        assert instance_id.startswith("own-")
        self.calls.append(("reply", messages))
        if self.config.get("blocks"):
            threading.Event().wait(self.config["blocks"])
        if self.config.get("raises"):
            raise KeyError("no such thing")
        if self.config.get("says") is not None:
            return self.config["says"]
        heard = messages[-1]["content"]
        return heard == "bye", f"you said {heard}", 0.5, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        self.ended.append(instance_id)


@pytest.fixture
def tokenizer():
    return tokenizer_of(FAMILIES["qwen"])


@pytest.fixture
def config(tmp_path):
    def configured(interactions="[{class_name: tests.experimental.agent_loop.test_interactions.Recorded}]", **own):
        path = tmp_path / "interactions.yaml"
        path.write_text(f"interaction: {interactions}")
        tools = tmp_path / "tools.yaml"
        tools.write_text("tools: [{class_name: 'tests.experimental.agent_loop.fakes:AddTool'}]")
        own = {"enable": "true", "interaction_config_path": path, "tool_config_path": tools, **own}
        return load_config(["data.max_prompt_length=2000", *(f"{MULTI_TURN}.{key}={own[key]}" for key in own)])

    return configured


def run(config, tokenizer, *texts, **sample):
    manager = ScriptedManager(tokenizer, *texts)
    loop = ToolAgentLoop(trainer_config=DictConfigWrap(config), server_manager=manager, tokenizer=tokenizer)
    sampling = SamplingOptions(max_tokens=20_000).as_dict()
    return asyncio.run(loop.run(sampling, raw_prompt=PROMPT, **sample)), loop


def test_it_answers_messages_that_call_no_tool_until_all_is_said(config, tokenizer):
    asked = {"name": "recorded", "ground_truth": "3"}
    output, loop = run(config(), tokenizer, "hello", f"</think>{CALL}", "bye", extra_info={"interaction_kwargs": asked})
    partner = loop.interactions["recorded"]
    assert partner.calls[0] == ("start", asked)
    assert partner.calls[1][1] == [*PROMPT, {"role": "assistant", "content": "hello"}]
    assert [message["role"] for message in partner.calls[2][1]] == [
        *("user", "assistant", "user", "assistant", "tool", "assistant"),
    ]
    assert len(partner.calls) == 3
    assert len(partner.ended) == 1
    shown = inserted(tokenizer, output)
    assert "<|im_start|>user\nyou said hello<|im_end|>" in shown
    assert "<tool_response>\n3\n</tool_response>" in shown
    assert "you said bye" not in shown
    assert output.extra_fields["turn_scores"] == [0.5, 0.5]
    assert output.num_turns == 6


def test_a_sample_that_asks_for_none_has_none(config, tokenizer):
    output, loop = run(config(), tokenizer, "hello")
    assert loop.interactions["recorded"].calls == []
    assert (output.num_turns, "turn_scores" in output.extra_fields) == (2, False)


def test_a_conversation_ends_with_the_last_message_that_is_allowed_too(config, tokenizer):
    output, loop = run(config(max_assistant_turns=2), tokenizer, "a", "b", interaction_kwargs={"name": "recorded"})
    assert output.num_turns == 4
    assert len(loop.interactions["recorded"].ended) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("raises: true", r"interaction recorded: generate_response: KeyError: 'no such thing'"),
        ("says: [1]", r"generate_response returns \(over, text, score, metadata\), not \[1\]"),
        ("blocks: 9", r"interaction recorded: generate_response did not answer within 0.2 s"),
    ],
)
def test_what_goes_wrong_in_it_ends_the_sample_by_its_name_and_the_conversation(
    config, tokenizer, options, message, monkeypatch
):
    entry = f"[{{class_name: tests.experimental.agent_loop.test_interactions.Recorded, config: {{{options}}}}}]"
    configured = config(entry, tool_timeout_s=60.0)
    answered = ToolThread.run

    async def run_soon(self, work, name, *, timeout_s):
        return await answered(self, work, name, timeout_s=0.2 if name.endswith("generate_response") else timeout_s)

    if "blocks" in options:
        monkeypatch.setattr(ToolThread, "run", run_soon)
    with pytest.raises(AgentLoopError, match=message):
        run(configured, tokenizer, "hello", interaction_kwargs={"name": "recorded"})
    path = configured.actor_rollout_ref.rollout.multi_turn.interaction_config_path
    if "blocks" not in options:
        assert len(initialize_interactions_from_config(path)["recorded"].ended) == 1


def test_a_name_that_is_not_there_is_told(config, tokenizer):
    with pytest.raises(AgentLoopError, match="no interaction 'recordet'. Did you mean 'recorded'"):
        run(config(), tokenizer, "hello", interaction_kwargs={"name": "recordet"})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("{}", "holds no list of 'interaction'"),
        ("[{name: a}]", "lacks 'class_name'"),
        ("[{class_name: verl.interactions.base.Nobody}]", "has no class 'Nobody'"),
        ("[{class_name: verl.tools.base_tool.BaseTool}]", "not a subclass of BaseInteraction"),
        ("[{class_name: verl.interactions.base.BaseInteraction, params: 1}]", r"unknown \['params'\]"),
        ("[{class_name: verl.interactions.base.BaseInteraction}, {name: base, class_name: verl.interactions.base.BaseInteraction}]", "two interactions are called 'base'"),  # noqa: E501
        ("[{class_name: tests.experimental.agent_loop.test_interactions.Short}]", "Short: too many positional"),
    ],
)  # fmt: skip
def test_an_interaction_that_cannot_be_used_is_an_error_on_the_driver(config, entries, message):
    with pytest.raises(ConfigError, match=f"interaction_config_path=.*{message}"):
        AgentLoopManager.check_config(config(entries))


class Short(BaseInteraction):
    async def generate_response(self, instance_id):
        return True, "", 0.0, {}


def test_a_user_who_knows_the_number_asks_until_it_comes(config, tokenizer):
    entries = "[{class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction}]"
    sample = {"extra_info": {"interaction_kwargs": {"query": "1+2?", "ground_truth": "3"}}}
    output, _ = run(config(entries), tokenizer, "It is 4.", "Then it is 3", **sample)
    assert output.extra_fields["turn_scores"] == [0.0, 1.0]
    assert "That is not right." in inserted(tokenizer, output)


async def test_a_user_who_knows_the_number_wants_to_be_told_it():
    interaction = Gsm8kInteraction({"name": "gsm8k"})
    with pytest.raises(ValueError, match="has no ground_truth"):
        await interaction.start_interaction("a")
    assert await interaction.start_interaction("a", ground_truth=3) == "a"
    assert await interaction.calculate_score("a") == 0.0
    await interaction.finalize_interaction("a")
    await interaction.finalize_interaction("a")
