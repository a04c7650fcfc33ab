"""Built-in rewards against PyPI's verl: the same odd answers and truths through both, each in its own process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.originals.answers import MORE_TRUTHS, cases, responses
from tests.originals.original import OURS, VERL, computed, differences
from verl.utils.reward_score.default import RULES

EVERY = {"math_dapo": 1, "openai/gsm8k": 1, "lighteval/MATH": 1, "numina_cn_k12": 151}
"""Source -> each how many-th case; the last one takes verl 20 ms for each, and says little more with more."""
ALIASES = [
    *("aime", "aime24", "aime_2025", "math", "math_dapo_reasoning"),
    *("DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
]
EXACT = [source for source in EVERY if not source.startswith("numina")]
OWN = {"builtin/arithmetic", "builtin/shapes", "hiyouga/geometry3k"}


@pytest.fixture(scope="module")
def both() -> list[tuple[tuple[str, str, str], dict[str, object], dict[str, object]]]:
    """(case, verl's score, ours) of every case."""
    given = [case for source, step in EVERY.items() for case in cases(source, step)]
    given += [case for source in ALIASES for case in cases(source, 41)]
    given += [case for source in [*EXACT, *ALIASES] for case in cases(source, 61, MORE_TRUTHS)]
    given += cases("HuggingFaceH4/aime_2024", 4001)
    verls, ours = (computed("score_answers.py", given, folder) for folder in (VERL, OURS))
    return list(zip(given, verls, ours, strict=True))


def test_there_are_many_odd_answers() -> None:
    assert len(set(responses())) > 2000


@pytest.mark.parametrize("source", [*EXACT, *ALIASES])
def test_a_built_in_reward_gives_every_odd_answer_what_verl_gives_it(both: list[Any], source: str) -> None:
    compared = [(case, verls, ours) for case, verls, ours in both if case[0] == source]
    assert len(compared) > 200
    assert [one for one in compared if one[1] != one[2]] == []


@pytest.mark.parametrize(("name", "source"), [("numina_*", "numina_cn_k12"), *[("HuggingFaceH4/aime_2024",) * 2]])
def test_a_reward_that_differs_on_purpose_is_listed_with_the_reason(both: list[Any], name: str, source: str) -> None:
    assert any(verls != ours for case, verls, ours in both if case[0] == source)
    assert differences()[f"reward of {name}"]["why"]


def test_geometry_weighs_form_and_answer_as_verl_does() -> None:
    ways = (
        *("{}", "<think>a</think>{}", "<think>a\nb</think> so\n{} ", " <think>a</think>{}", "<THINK>a</THINK>{}"),
        *("<think>{}</think>", "{}<think>a</think>", "<think></think>{}<think>", "<think>a</think>\\boxed{1}{}"),
    )
    answers = ("\\boxed{3}", "\\boxed{4}", "\\boxed{ 3 }", "\\boxed{3}\\boxed{4}", "\\boxed{}", "3", "\\fbox{3}", "")
    given = [("hiyouga/geometry3k", way.replace("{}", answer, 1), "3") for way in ways for answer in answers]
    given = [(source, text, truth) for source, text, truth in given if "\\boxed{1}" not in text or "\\boxed{3}" in text]
    verls, ours = (computed("score_answers.py", given, folder) for folder in (VERL, OURS))
    assert {round(one["score"], 6) for one in verls} == {0.0, 0.1, 0.9, 1.0}
    assert [case for case in zip(given, verls, ours, strict=True) if case[1] != case[2]] == []
    assert differences()["reward of hiyouga/geometry3k"]["why"]


def test_every_built_in_reward_is_held_against_verl_or_listed() -> None:
    held = {*EVERY, *ALIASES, *OWN, "HuggingFaceH4/aime_2024"}
    assert [source for source in RULES if source not in held and not source.startswith("numina_")] == []
