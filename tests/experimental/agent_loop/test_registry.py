import pytest

from tests.experimental.agent_loop.fakes import ConstantLoop
from verl.experimental.agent_loop import SingleTurnAgentLoop, register
from verl.experimental.agent_loop.registry import constructor_arguments, known_loops, loop_factory
from verl.utils.config import ConfigError
from verl.workers.config import PPOConfig

FAKES = "tests.experimental.agent_loop.fakes"


def test_built_in_loops_are_found_by_name():
    assert loop_factory("single_turn_agent", known_loops()).func is SingleTurnAgentLoop


def test_a_registered_class_is_found_and_may_register_again():
    assert register("constant_for_test")(ConstantLoop) is ConstantLoop
    register("constant_for_test")(ConstantLoop)
    assert loop_factory("constant_for_test", known_loops()).func is ConstantLoop


def test_a_name_belongs_to_one_class():
    with pytest.raises(ConfigError, match="already registered as 'single_turn_agent'"):
        register("single_turn_agent")(ConstantLoop)


def test_a_name_with_a_colon_is_its_own_class():
    assert loop_factory(f"{FAKES}:ConstantLoop", {}).func is ConstantLoop


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"unknown agent loop 'tool_agnt'\. Did you mean 'tool_agent'"):
        loop_factory("tool_agnt", known_loops())


def test_a_yaml_file_adds_loops_with_options_and_takes_precedence(tmp_path):
    path = tmp_path / "loops.yaml"
    path.write_text(f"- {{name: tool_agent, _target_: {FAKES}.ConstantLoop, token: 5}}")
    made = loop_factory("tool_agent", known_loops(str(path)))(**constructor_arguments(PPOConfig(), None, None))
    assert isinstance(made, ConstantLoop)
    assert made.token == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: x", "holds a list of entries"),
        ("- {name: x}", "entry 0 lacks 'name' or '_target_'"),
        ("- [", "is not YAML"),
        (b"\x80", "is not YAML: .*decode byte 0x80"),
    ],
)
def test_a_yaml_file_that_cannot_be_used_says_why(tmp_path, content, message):
    path = tmp_path / "loops.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        known_loops(str(path))


def test_a_class_that_is_no_agent_loop_is_an_error():
    with pytest.raises(ConfigError, match="is not a subclass of AgentLoopBase"):
        loop_factory(f"{FAKES}:AddTool", {})
