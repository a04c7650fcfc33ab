"""Reward managers against PyPI's verl: the same responses of odd lengths, the same functions, rewards and what beside.

verl has managers of its trainers (`naive`, `dapo`), and older ones that scripts can make (`old ...`). Each function of
`reward_batches` sees batches with missing columns, empty responses and special tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.originals.original import OURS, VERL, computed, differences
from tests.originals.reward_batches import FUNCTIONS
from verl.utils.builtin.tokenizer import build_tokenizer
from verl.utils.config import ConfigError
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import get_reward_manager_cls

TOKENIZER = build_tokenizer()
END = TOKENIZER.eos_token_id
ROLE, CALL = (TOKENIZER.convert_tokens_to_ids(token) for token in ("<|tool|>", "<tool_call>"))


def row(text: str, truth: Any, *, end: bool = True, **columns: Any) -> list[Any]:
    return [[*TOKENIZER.encode(text), *([END] if end else [])], {"ground_truth": truth, "style": "rule"}, columns]


NUMBERED: dict[str, Any] = {"extra_info": {"index": 3, "split": "train"}}
BATCHES: dict[str, list[Any]] = {
    "odd lengths": [
        row("12", "12", **NUMBERED),
        row("7", "8", extra_info={}),
        row("12345678", "1", end=False, **NUMBERED),
        row("1234567", 1234567, **NUMBERED),
        row(" 7 \n", 7, **NUMBERED),
    ],
    "no extra_info": [row("12", "12"), row(" 7", ["7"])],
    "special tokens": [
        [[*TOKENIZER.encode("1"), END, *TOKENIZER.encode("2"), END], {"ground_truth": "12"}, NUMBERED],
        [[ROLE, CALL, *TOKENIZER.encode("3"), ROLE], {"ground_truth": "3"}, NUMBERED],
    ],
    "of an agent loop": [
        row("12", "12", __num_turns__=4, tool_extra_fields={"x": 2}, reward_scores={"turn": [1]}, **NUMBERED),
        row("7", "8", __num_turns__=2, tool_extra_fields={}, reward_scores={}, **NUMBERED),
    ],
}
EMPTY = "empty responses"
MISSING = "no ground truth"
LACKING = "one extra_info is None"
ODD = {
    EMPTY: [[[], {"ground_truth": "12"}, NUMBERED], [[END], {"ground_truth": ""}, NUMBERED], row("7", "7", **NUMBERED)],
    MISSING: [[[*TOKENIZER.encode("12"), END], {"style": "rule"}, NUMBERED], row("7", None, **NUMBERED)],
    LACKING: [row("12", "12", extra_info={"a": 1}), row("7", "7")],
}
REFUSED = {"raising", "without a score", "nothing", "text"}
NO_NUMBER = {"no number", "infinite"}
OFF = {"enable": False, "len": 0, "penalty_factor": 0.0, "log": False}
SMALL = {"enable": True, "len": 4, "penalty_factor": 1.0, "log": True}
WHOLE = {"enable": True, "len": 8, "penalty_factor": 0.3, "log": False}
OF_TRAINERS = [("naive", OFF), ("gdpo", OFF), ("dapo", OFF), ("dapo", SMALL), ("dapo", WHOLE)]
FEW = ("number", "truth", "rated", "raising", "nothing")
OLD = [("naive", OFF), ("dapo", SMALL), ("batch", OFF), ("prime", OFF)]

Case = tuple[str, str, dict[str, Any], str]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Case, Any, Any]]:
    """(case, verl's, ours): managers of verl's trainers first."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)
    telling = [name for name in FUNCTIONS if name not in REFUSED | NO_NUMBER]
    cases: list[Case] = [(batch, *manager, name) for batch in BATCHES for manager in OF_TRAINERS for name in telling]
    cases += [(batch, "naive", OFF, name) for batch in ODD for name in ("number", "rated", "seen")]
    cases += [("odd lengths", "naive", OFF, name) for name in (*REFUSED, *NO_NUMBER)]
    old: list[Case] = [("odd lengths", f"old {name}", buffer, function) for name, buffer in OLD for function in FEW]
    given = {"tokenizer": str(folder), "batches": BATCHES | ODD, "cases": [*cases, *old]}
    verls, ours = (computed("reward_batches.py", given, verl) for verl in (VERL, OURS))
    return list(zip([*cases, *old], verls, ours, strict=True))


def near(ours: list[list[float]], verls: list[list[float]]) -> bool:
    """To the rounding of float32."""
    return all(row == pytest.approx(others) for row, others in zip(ours, verls, strict=True))


def seen(found: Any) -> list[Any]:
    """The `extra_info` of each sample."""
    return [json.loads(info["seen"])["extra_info"] for info in found["infos"]]


def told(found: Any) -> Any:
    """Without the `score` of a dict, which is the reward once more."""
    return [{key: value for key, value in info.items() if key != "score"} for info in found["infos"]]


@pytest.mark.parametrize("name", ["naive", "dapo", "gdpo"])
def test_rewards_and_what_else_a_function_says_are_verls(both: list[Any], name: str) -> None:
    compared = 0
    for case, verls, ours in both:
        batch, manager, buffer, function = case
        if manager != name or batch in ODD or function in REFUSED | NO_NUMBER:
            continue
        assert "error" not in verls and "error" not in ours, (case, verls, ours)
        compared += 1
        assert near(ours["rewards"], verls["rewards"]), case
        infos = told(ours)
        if manager != "naive" and function == "seen":  # what the agent loop adds is there in naive alone
            assert all(seen(ours)[row].items() >= given.items() for row, given in enumerate(seen(verls))), case
            continue
        if buffer["enable"] and not all("acc" in info for info in told(verls)):
            assert differences()["`acc` with the penalty for length"]["why"]
            assert all(info.pop("acc") == info_of["score"] for info, info_of in zip(infos, verls["infos"], strict=True))
        assert infos == told(verls), case
    assert compared >= len(BATCHES) * (len(FUNCTIONS) - len(REFUSED | NO_NUMBER))
    assert differences()["`val-aux/<data source>/score/*`"]["why"]


def test_a_function_that_raises_or_gives_no_number_ends_a_run_in_both(both: list[Any]) -> None:
    for case, verls, ours in both:
        if case[3] in REFUSED and case[1] != "old prime":
            assert "error" in verls and "error" in ours, case
            assert ours["error"].startswith("RewardError: the reward function "), case


def test_rewards_that_are_no_finite_numbers_are_listed_with_the_reason(both: list[Any]) -> None:
    assert differences()["rewards that are no finite numbers"]["why"]
    for case, verls, ours in both:
        if case[3] in NO_NUMBER:
            assert "of a finite number" in ours["error"] and "error" not in verls, case


def test_where_the_reward_of_an_empty_response_is_is_listed_with_the_reason(both: list[Any]) -> None:
    assert "6476" in differences()["the reward of an empty response"]["why"]
    for case, verls, ours in both:
        if case[0] == EMPTY:
            assert sum(ours["rewards"][0]) == 0.0, case
            assert sum(map(abs, verls["rewards"][0][:-1])) == 0.0, case
            assert ours["rewards"][1:] == verls["rewards"][1:], case
    on_padding = [verls["rewards"][0][-1] for case, verls, _ in both if case[0] == EMPTY and case[3] == "rated"]
    assert -1.0 in on_padding


def test_what_a_row_may_lack_is_listed_with_the_reason(both: list[Any]) -> None:
    assert differences()["a row without a ground truth, or without `extra_info`"]["why"]
    lacking = [one for one in both if one[0][0] in (MISSING, LACKING)]
    assert {verls.get("error", "").split(":")[0] for _, verls, _ in lacking} >= {"KeyError", "TypeError"}
    assert all("error" not in ours for _, _, ours in lacking)


def test_a_built_in_rule_refuses_a_row_without_a_ground_truth() -> None:
    with pytest.raises(ConfigError, match="'openai/gsm8k' has no ground truth"):
        default_compute_score("openai/gsm8k", "#### 3", None)


@pytest.mark.parametrize("name", [name for name, _ in OLD])
def test_rewards_of_a_manager_for_scripts_are_verls(both: list[Any], name: str) -> None:
    """Where the function gives a number; that of `batch` is asked for one sample here, and for all at once there."""
    compared = [one for one in both if one[0][1] == f"old {name}"]
    assert len(compared) == len(FEW)
    for case, verls, ours in compared:
        if name == "prime" and case[3] not in ("number", "truth"):
            continue
        if case[3] in REFUSED:
            assert "error" in ours and "error" in verls, case
        else:
            assert near(ours["rewards"], verls["rewards"]), case


def test_what_prime_gives_where_there_is_no_number_is_listed_with_the_reason(both: list[Any]) -> None:
    assert differences()["`prime` and a function that raises, or returns a dict"]["why"]
    compared = [one for one in both if one[0][1] == "old prime" and one[0][3] not in ("number", "truth")]
    for case, verls, ours in compared:
        assert {value for row in verls["rewards"] for value in row} == {0.0}, case
        assert "error" in ours or case[3] == "rated", case


@pytest.mark.parametrize(("name", "remedy"), [("batch", "one sample"), ("rate_limited", "num_workers")])
def test_a_manager_that_is_not_here_is_refused_with_what_to_do(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"reward_manager={name} is not here: .*{remedy}"):
        get_reward_manager_cls(name)
