import asyncio

import pytest
import yaml

from tests.experimental.agent_loop.scripted_manager import ScriptedManager
from verl.experimental.agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.base import DictConfigWrap
from verl.experimental.agent_loop.tool_answers import ToolThread
from verl.experimental.agent_loop.tool_calls import ToolCalls
from verl.experimental.agent_loop.tool_files import load_tools
from verl.experimental.agent_loop.tools import AgentData
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.trainer.config.loader import load_config
from verl.utils.config import ConfigError
from verl.workers.rollout.records import SamplingOptions

SCHEMA = {
    "type": "function",
    "function": {
        "name": "check",
        "description": "Checks an answer.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer.", "minLength": 1}},
            "required": ["answer"],
        },
    },
}
LIFE = []


class Check(BaseTool):
    """Written for verl."""

    async def create(self, instance_id=None, **kwargs):
        instance_id, response = await super().create(instance_id, **kwargs)
        LIFE.append(("create", kwargs["create_kwargs"]))
        self.truth = kwargs["create_kwargs"]["ground_truth"]
        return instance_id, response

    async def execute(self, instance_id, parameters, **kwargs):
        LIFE.append(("execute", parameters, kwargs["agent_data"].request_id))
        if parameters["answer"] == "raise":
            raise RuntimeError("broken")
        return ToolResponse(text=f"{self.config['unit']}{parameters['answer']}"), 0.25, {"seen": 1}

    async def calc_reward(self, instance_id, **kwargs):
        LIFE.append(("calc_reward",))
        return 1.0

    async def release(self, instance_id, **kwargs):
        LIFE.append(("release",))


class CreatesByName(Check):
    async def create(self, instance_id=None, ground_truth=None):
        self.truth = ground_truth
        return "id", ToolResponse()


class ExecutesWithoutAgentData(BaseTool):
    async def execute(self, instance_id, parameters):
        return ToolResponse(), 0.0, {}


class ReturnsText(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return "only text"


def tool_of(tmp_path, name, schema=SCHEMA, **fields):
    path = tmp_path / f"{name}.yaml"
    entry = {"class_name": f"{__name__}.{name}", "config": {"type": "native", "unit": "$"}, "tool_schema": schema}
    path.write_text(yaml.safe_dump({"tools": [{**entry, **fields}]}))
    (tool,) = load_tools(str(path)).values()
    return tool


def answer(tool, data, **arguments):
    LIFE.clear()
    return asyncio.run(ToolThread().answer(tool, arguments, data, timeout_s=60)).text


def data():
    return AgentData(request_id="r1", tools_kwargs={"check": {"create_kwargs": {"ground_truth": "7"}}})


def test_a_call_is_a_whole_life_of_an_instance(tmp_path):
    known = data()
    assert answer(tool_of(tmp_path, "Check"), known, answer="7") == "$7"
    assert LIFE == [
        ("create", {"ground_truth": "7"}),
        ("execute", {"answer": "7"}, "r1"),
        ("calc_reward",),
        ("release",),
    ]
    assert (known.tool_rewards, known.reward_scores) == ([0.25], {"check": 1.0})


def test_what_a_tool_raises_is_told_to_the_model_and_the_instance_released(tmp_path):
    assert answer(tool_of(tmp_path, "Check"), data(), answer="raise") == "error: RuntimeError: broken"
    assert [name for name, *_ in LIFE] == ["create", "execute", "release"]


def test_create_may_take_its_arguments_one_by_one(tmp_path):
    tool = tool_of(tmp_path, "CreatesByName")
    assert answer(tool, data(), answer="8") == "$8"
    assert tool.tool.truth == "7"


def test_the_model_is_shown_the_schema_as_it_was_written(tmp_path):
    assert tool_of(tmp_path, "Check").schema == SCHEMA


def test_a_tool_may_bring_its_schema(tmp_path):
    class Brings(Check):
        def get_openai_tool_schema(self):
            return OpenAIFunctionToolSchema.model_validate(SCHEMA)

    assert Brings(config={}).name == "check"
    with pytest.raises(ConfigError, match="tool Check has no schema"):
        tool_of(tmp_path, "Check", schema=None)


@pytest.mark.parametrize(
    ("name", "schema", "message"),
    [
        ("ExecutesWithoutAgentData", SCHEMA, r"ExecutesWithoutAgentData.execute.*cannot take .*agent_data"),
        ("Check", {"type": "function"}, r"tool_schema: .*function"),
    ],
)
def test_a_tool_that_cannot_be_called_is_an_error_before_anything_starts(tmp_path, name, schema, message):
    with pytest.raises(ConfigError, match=message):
        tool_of(tmp_path, name, schema)


def test_a_tool_that_returns_something_else_says_so(tmp_path):
    assert "returns (ToolResponse, reward, metrics)" in answer(tool_of(tmp_path, "ReturnsText"), data(), answer="1")


class Pays(Check):
    """With what it gets told to others, and what it can tell of a call that had begun."""

    idempotent = True

    async def execute(self, instance_id, parameters, *, agent_data):
        agent_data.extra_fields["paid"] = [1]
        return ToolResponse(text=agent_data.idempotency_key), 0.25, {}

    def outcome(self, parameters, idempotency_key):
        return f"{parameters['answer']} is {idempotency_key}"


@pytest.mark.parametrize(
    ("name", "field", "idempotent"),
    [("Pays", {}, True), ("Pays", {"idempotent": False}, False), ("Check", {}, False)],
)
def test_the_entry_or_the_class_says_whether_a_call_may_be_repeated(tmp_path, name, field, idempotent):
    assert tool_of(tmp_path, name, **field).idempotent is idempotent


def test_what_a_tool_of_verl_adds_to_its_sample_is_there_in_the_next_attempt(tmp_path, tokenizer):
    """Of the first attempt's rewards, and not of a second execution."""
    call = '<tool_call>{"name": "check", "arguments": {"answer": "7"}}</tool_call>'
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    tool_of(tmp_path, "Pays")
    config = load_config(
        [
            f"{multi_turn}.enable=true",
            f"{multi_turn}.tool_config_path={tmp_path / 'Pays.yaml'}",
            "data.max_prompt_length=2000",
        ]
    )

    async def attempt(number):
        manager = ScriptedManager(tokenizer, call, "done")
        loop = ToolAgentLoop(trainer_config=DictConfigWrap(config), server_manager=manager, tokenizer=tokenizer)
        loop.tool_calls = ToolCalls(tmp_path / "0.calls", takes_over=number > 0).of("uid", "name")
        sampling = SamplingOptions(max_tokens=600)
        tools_kwargs = {"check": {"create_kwargs": {"ground_truth": "7"}}}
        messages = [{"role": "user", "content": "1+2?"}]
        return await loop.run(sampling.as_dict(), raw_prompt=messages, tools_kwargs=tools_kwargs)

    LIFE.clear()
    first, second = (asyncio.run(attempt(number)) for number in range(2))
    assert second.extra_fields == first.extra_fields
    assert first.extra_fields == {"paid": [1], "tool_rewards": [0.25], "reward_scores": {"check": 1.0}}
    assert second.response_ids == first.response_ids
    assert [name for name, *_ in LIFE] == ["create", "calc_reward", "release"]


def test_a_tool_of_verl_may_know_what_became_of_a_call(tmp_path):
    def outcome(name):
        asked = AgentData(idempotency_key="k1")
        work = ToolThread().answer(tool_of(tmp_path, name), {"answer": "7"}, asked, timeout_s=60, has_begun=True)
        return asyncio.run(work).text

    assert outcome("Pays") == "7 is k1"
    assert outcome("Check") == "error: check was interrupted; it may have been executed, and is not repeated"
