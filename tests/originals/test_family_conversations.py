"""As test_conversations.py, with the chat templates of model families and the rules that verl has for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.originals.conversations import both as said_by_both
from tests.originals.conversations import case
from tests.originals.families import FAMILIES, Family
from tests.originals.original import differences

ASKED = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": "<think>\n1, 2\n</think>\n\n3"},
    {"role": "user", "content": " +2? "},
]


def conversations(family: Family) -> dict[str, dict[str, Any]]:
    """With tools, several turns, and what does not fit."""
    say = family.says

    def talk(*says: str, multi_turn: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        options = {"format": family.format, **(multi_turn or {})}
        return case(*says, **{"lengths": (900, 900), "model_type": family.model_type, "multi_turn": options, **more})

    one: dict[str, Any] = {"loop": "single_turn_agent", "prompt": ASKED}
    return {
        "no call": talk(say("3")),
        "one call": talk(say("Hm.", "3"), say("3")),
        "two calls in two messages": talk(say("", "a"), say("b", "b"), say("ab")),
        "two calls at once": talk(say("", "a", "b"), say("ab"), multi_turn={"max_parallel_calls": 2}),
        "a conversation before": talk(say("", "5"), say("5"), prompt=ASKED),
        "a system message": talk(say("", "3"), say("3"), prompt=ASKED[:2]),
        "thoughts": talk(say("<think>\n1\n</think>\n\n", "3"), say("<think>\n2\n</think>\n\n3")),
        "no thinking": talk(say("", "3"), say("3"), arguments={"enable_thinking": False}),
        "white space and unicode of a tool": talk(say("", " \n漢 ü𝄞\n"), say(" é ")),
        "a tool that says what ends a message": talk(say("", f"a{family.end}b"), say("3")),
        "a message too long": talk("x" * 500, lengths=(900, 40)),
        "a tool's answer too long for the rest": talk(say("", "x" * 100), say("3"), lengths=(900, 280)),
        "too many messages": talk(*[say("", "a")] * 3, multi_turn={"max_assistant_turns": 2}),
        "one turn": talk(say("3"), **one),
        "one turn, no thinking": talk(say("3"), **one, arguments={"enable_thinking": False}),
        "a prompt that is cut": talk(say("3"), **one | {"prompt": "y" * 60}, lengths=(40, 40)),
    }


CASES = {(name, talk): of for name, family in FAMILIES.items() for talk, of in conversations(family).items()}
WITHOUT_CALLS = {"no call", "a message too long", "one turn", "one turn, no thinking", "a prompt that is cut"}
ENDS = "a tool that says what ends a message"
AS_VERL = [
    (name, talk)
    for name, talk in CASES
    if talk in WITHOUT_CALLS
    or (name not in ("glm4", "kimi", "mistral") and talk != ENDS and (name, talk) != ("llama3", "two calls at once"))
]


def answered(name: str) -> list[str]:
    """The conversations of a family in which a tool answers, but for the one of which the answer is no common text."""
    return [talk for family, talk in CASES if family == name and talk not in {*WITHOUT_CALLS, ENDS}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def tokenizers(folder: Path) -> dict[str, Any]:
    return {name: family.save(folder / name) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def both(folder: Path, tokenizers: dict[str, Any]) -> dict[Any, tuple[dict[str, Any], dict[str, Any]]]:
    return said_by_both(CASES, {key: folder / key[0] for key in CASES}, folder)


@pytest.mark.parametrize(("family", "talk"), AS_VERL)
def test_a_conversation_has_verls_tokens_masks_and_positions(both: dict[Any, Any], family: str, talk: str) -> None:
    """Where verl's template writes no such conversation (Gemma has no tools), ours does not either."""
    verls, own = both[family, talk]
    if "error" in verls:
        assert (verls["error"], own) == ("TemplateError", {"error": "AgentLoopError"})
    else:
        assert own == {name: value for name, value in verls.items() if name != "rules"}


def test_verl_has_applied_the_rules_of_each_family(both: dict[Any, Any]) -> None:
    """Not those for any: the comparison would be with less than verl has."""
    assert {name: both[name, "no call"][0]["rules"].removesuffix("ContinuousTokenBuilder") for name in FAMILIES} == {
        "qwen2.5": "Qwen",
        "qwen3": "Qwen",
        "llama3": "",
        "gemma3": "",
        "deepseek": "DeepSeek",
        "mistral": "",
        "glm4": "GLM",
        "gpt-oss": "GptOss",
        "minimax": "MiniMax",
        "kimi": "",
    }


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gemma3", "mistral", "kimi")])
def test_what_a_tool_says_is_text_be_it_the_end_of_a_message(
    both: dict[Any, Any], tokenizers: dict[str, Any], family: str
) -> None:
    verls, own = (one["response_ids"] for one in both[family, ENDS])
    tokenizer, end = tokenizers[family], FAMILIES[family].end
    assert tokenizer.decode(own) == tokenizer.decode(verls)
    number = tokenizer.convert_tokens_to_ids(end)
    assert verls.count(number) == own.count(number) + 1
    assert differences()["special tokens in what tools say"]["why"]


@pytest.mark.parametrize("talk", answered("glm4"))
def test_a_token_that_the_policy_wrote_is_trained_though_the_next_message_begins_with_it(
    both: dict[Any, Any], tokenizers: dict[str, Any], talk: str
) -> None:
    verls, own = both["glm4", talk]
    assert own["response_ids"] == verls["response_ids"]
    assert {at: own["tensors"][at] for at in own["tensors"] if at != "response_mask"} == {
        at: verls["tensors"][at] for at in verls["tensors"] if at != "response_mask"
    }
    differ = [at for at, (o, v) in enumerate(zip(own["response_mask"], verls["response_mask"], strict=True)) if o != v]
    observation = tokenizers["glm4"].convert_tokens_to_ids("<|observation|>")
    assert differ
    assert {(own["response_ids"][at], own["response_mask"][at]) for at in differ} == {(observation, 1)}
    assert differences()["a message that ends with the beginning of the next one (GLM)"]["why"]


@pytest.mark.parametrize("talk", answered("kimi"))
def test_a_template_that_shows_the_name_of_the_tool_that_answers_gets_it(
    both: dict[Any, Any], tokenizers: dict[str, Any], talk: str
) -> None:
    verls, own = (tokenizers["kimi"].decode(one["response_ids"]) for one in both["kimi", talk])
    assert own != verls
    assert own.replace("<|im_system|>echo<|im_middle|>", "<|im_system|>tool<|im_middle|>") == verls
    assert differences()["the name of a tool beside its answer"]["why"]


@pytest.mark.parametrize(
    ("family", "talk"), [("llama3", "two calls at once"), *(("mistral", talk) for talk in answered("mistral"))]
)
def test_answers_are_shown_by_templates_that_refuse_the_calls_that_verl_makes_up(
    both: dict[Any, Any], tokenizers: dict[str, Any], family: str, talk: str
) -> None:
    verls, own = both[family, talk]
    assert verls == {"error": "TemplateError"}
    shown = [token for token, mask in zip(own["response_ids"], own["response_mask"], strict=True) if not mask]
    before = {"llama3": "ipython<|end_header_id|>\n\n", "mistral": '[TOOL_RESULTS] {"content": '}[family]
    answers = tokenizers[family].decode(shown).split(before)[1:]
    assert len(answers) == {"two calls at once": 2, "two calls in two messages": 2}.get(talk, 1)
    assert all(answer.startswith('"') for answer in answers)
    assert differences()["templates that refuse a call that was made up"]["why"]
