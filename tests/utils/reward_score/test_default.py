import threading

import math_verify as library
import pytest

from verl.utils.config import ConfigError
from verl.utils.reward_score import default_compute_score, gsm8k, math_dapo, math_reward, math_verify

MATH = ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"]
DAPO = ["math_dapo", "math", "math_dapo_reasoning", "aime", "aime24", "aime_2025", "aime2026_test"]
NUMINA = [
    *("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime"),
    *("numina_synthetic_amc", "numina_cn_k12", "numina_olympiads"),
]


@pytest.mark.parametrize(
    ("solution", "score"),
    [("82", 1.0), (" 82\n", 1.0), ("82?", 0.0), ("082", 0.0), ("", 0.0), ("The answer is 82", 0.0)],
)
def test_builtin_arithmetic_is_an_exact_match(solution, score):
    assert default_compute_score("builtin/arithmetic", solution, "82", {"index": 0}) == score


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("3 * 4 = 12\n#### 12", "12", 1.0),
        ("#### 1,200", "1200", 1.0),
        ("#### -3.5", "-3.5", 1.0),
        ("#### 7, no: #### 12", "12", 1.0),
        ("#### 12\n#### 7", "12", 0.0),
        ("#### 12 apples", "12", 1.0),
        ("#### 13", "12", 0.0),
        ("####12", "12", 0.0),
        ("#### $12", "12", 0.0),
        ("#### 12.", "12", 0.0),
        ("#### 12.0", "12", 0.0),
        ("#### 012", "12", 0.0),
        ("#### 12345678901234567890123", "12345678901234567890123", 1.0),
        ("12", "12", 0.0),
        ("", "12", 0.0),
        ("#### 12" + " " * 293, "12", 1.0),
        ("#### 12" + " " * 294, "12", 0.0),
    ],
)
def test_gsm8k_takes_the_text_after_the_last_mark_of_the_last_300_characters(solution, truth, score):
    assert default_compute_score("openai/gsm8k", solution, truth) == score


@pytest.mark.parametrize(
    ("solution", "answer"),
    [("so 12 apples", "12"), ("12 or 13.", "13."), ("it is 7. ", "7."), ("12 . ", "12"), ("none", None)],
)
def test_flexible_gsm8k_takes_the_last_number(solution, answer):
    assert gsm8k.extract_solution(solution, method="flexible") == answer
    assert gsm8k.compute_score(solution, "12", method="flexible", format_score=0.1, score=2.0) == (
        {"12": 2.0, None: 0.0}.get(answer, 0.1)
    )


@pytest.mark.parametrize("source", MATH)
@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (r"so it is \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\tfrac{1}{2}}", "1/2", 1.0),
        (r"\boxed{0.5}", r"\frac12", 1.0),
        (r"\boxed{.5}", "0.5", 1.0),
        (r"\boxed{0.25}", r"\frac{1}{4}", 0.0),
        (r"\boxed{\sqrt3}", r"\sqrt{3}", 1.0),
        (r"\boxed{x = 3}", "3", 1.0),
        (r"\boxed{xyz = 3}", "3", 0.0),
        (r"\boxed{45^\circ}", "45", 1.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{\$5}", "5", 1.0),
        (r"\boxed{5 \text{ cm}}", "5", 1.0),
        (r"\boxed{5\text{cm}}", "5", 0.0),
        (r"\boxed{\left( 1, 2 \right)}", "(1,2)", 1.0),
        (r"\boxed{1,000}", "1000", 0.0),
        (r"\boxed{1} and \boxed{2}", "2", 1.0),
        (r"\boxed{2} and \boxed{1}", "2", 0.0),
        (r"$\boxed 7$ it is", "7", 1.0),
        (r"\fbox{7}", "7", 0.0),
        (r"\boxed{7", "7", 0.0),
        ("the answer is $7$", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_math_compares_the_last_box_in_its_normal_form(source, solution, truth, score):
    assert default_compute_score(source, solution, truth) == score


@pytest.mark.parametrize("source", DAPO)
@pytest.mark.parametrize(
    ("solution", "truth", "score", "prediction"),
    [
        ("Answer: 34", "34", 1.0, "34"),
        ("so\nAnswer: $34$", "34", 1.0, "34"),
        ("answer :  34 ", "34", 1.0, "34"),
        (r"Answer: \boxed{34}", "34", 1.0, "34"),
        (r"Answer: $\boxed{34}$.", "34", 1.0, "34"),
        ("Answer: 1\nAnswer: 34", "34", 1.0, "34"),
        ("Answer: 34\nAnswer: 1", "34", -1.0, "1"),
        ("Answer: x = 34", "34", 1.0, "34"),
        ("Answer: 34 degrees", "34", 1.0, "34"),
        ("Answer: 1,000", "1000", 1.0, "1000"),
        (r"Answer: \frac12", r"\frac{1}{2}", 1.0, r"\frac{1}{2}"),
        (r"Answer: 34^\circ", "34", 1.0, "34"),
        ("Answer: 034", "34", -1.0, "034"),
        (r"so $\boxed{34}$", "34", 1.0, "34"),
        (r"\boxed{34 }", "34", -1.0, "34 "),
        (r"\boxed{34", "34", -1.0, "[INVALID]"),
        (r"\boxed{34}" + "." * 90, "34", 1.0, "34"),
        (r"\boxed{34}" + "." * 91, "34", -1.0, "[INVALID]"),
        ("Answer: 1\n\\boxed{34}", "34", -1.0, "1"),
        (r"Answer: 34 ft", "34", -1.0, "34ft"),
        (r"Answer: \left(1,2\right)", "(1,2)", -1.0, r"\left(1,2\right)"),
        ("34", "34", -1.0, "[INVALID]"),
        ("", "34", -1.0, "[INVALID]"),
        ("Answer: 34" + " " * 290, "34", 1.0, "34"),
        ("Answer: 34" + "\n" * 300, "34", -1.0, "[INVALID]"),
    ],
)
def test_dapo_rewards_the_last_answer_line_with_1_and_anything_else_with_minus_1(
    source, solution, truth, score, prediction
):
    assert default_compute_score(source, solution, truth) == {"score": score, "acc": score == 1.0, "pred": prediction}


@pytest.mark.parametrize(
    ("solution", "score", "prediction"),
    [
        (r"\boxed{34}", 1.0, "34"),
        (r"\boxed{ 34}", -1.0, " 34"),
        ("Answer: 34", -1.0, None),
        (r"\boxed{34}" + "." * 95, -1.0, None),
    ],
)
def test_dapos_strict_form_takes_the_box_to_the_letter(solution, score, prediction):
    result = math_dapo.compute_score(solution, "34", strict_box_verify=True)
    assert result == {"score": score, "acc": score == 1.0, "pred": prediction}


@pytest.mark.parametrize("source", [*NUMINA, "HuggingFaceH4/aime_2024"])
@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{12345678901234567890124}", "12345678901234567890123", 0.0),
        (r"\boxed{\text{Alice}}", r"\text{Alice}", 1.0),
        (r"\boxed{3}", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_numina_compares_values(source, solution, truth, score):
    assert default_compute_score(source, solution, truth) == score


@pytest.mark.parametrize("source", ["openai/gsm8k", "HuggingFaceH4/MATH-500", "math_dapo", "numina_cn_k12"])
@pytest.mark.parametrize("solution", ["{" * 3000, r"\boxed{" * 500, "\ud800 $5$", "$1/0$", "$" * 999, r"$\frac{}{}$"])
def test_no_response_makes_a_rule_raise(source, solution):
    result = default_compute_score(source, solution, "7")
    assert result["score"] == -1.0 if source == "math_dapo" else result == 0.0


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"a \boxed{1} \boxed{\frac{1}{2}} b", r"\boxed{\frac{1}{2}}"),
        (r"\fbox{1}", r"\fbox{1}"),
        ("none", None),
        (r"\boxed{1", None),
    ],
)
def test_the_last_box_of_a_text(text, boxed):
    assert math_reward.last_boxed_only_string(text) == boxed


def test_what_math_verify_builds_first_in_a_process_does_not_count_against_an_answer(monkeypatch):
    limits = []

    def parse(text, parsing_timeout):
        limits.append(parsing_timeout)
        return real(text, parsing_timeout=parsing_timeout)

    real = library.parse
    monkeypatch.setattr(library, "parse", parse)
    math_verify._library.cache_clear()
    try:
        assert [math_verify.compute_score("$34$", "34") for _ in range(2)] == [1.0, 1.0]
    finally:
        math_verify._library.cache_clear()
    first, *others = limits
    assert first is None
    assert set(others) == {math_verify.TIMEOUT_S}


def test_math_verify_works_outside_the_main_thread():
    scores = []
    thread = threading.Thread(target=lambda: scores.append(math_verify.compute_score("$34$", "34")))
    thread.start()
    thread.join()
    assert scores == [1.0]


@pytest.mark.parametrize("answer", ["3", "5", "\\sqrt{5}"])
def test_a_number_inside_of_the_truth_is_not_the_truth(answer):
    for source in ("numina_cn_k12", "hiyouga/geometry3k"):
        assert default_compute_score(source, f"\\boxed{{{answer}}}", "3 \\sqrt{5}") == 0.0


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("<think>a\nb</think> so \\boxed{3} cm", "3", 1.0),
        ("\\boxed{2}, no: \\boxed{3.0}", "3", 0.9),
        ("<think>a</think> \\boxed{\\frac{\\sqrt{12}}{2}}", "\\sqrt{3}", 1.0),
        ("<think>a</think> \\boxed{3}, no: \\boxed{4}", "3", 0.1),
        ("<think>a</think> 3", "3", 0.0),
        ("<think>a</think> \\boxed{}", "3", 0.1),
        (" <think>a</think> \\fbox{3}", "3", 0.0),
    ],
)
def test_geometry_is_scored_by_form_and_by_value(response, truth, score):
    assert default_compute_score("hiyouga/geometry3k", response, truth) == pytest.approx(score)


def test_a_data_source_without_a_rule_says_what_to_set():
    with pytest.raises(ConfigError, match=r"data_source 'my/data'.*set custom_reward_function.path"):
        default_compute_score("my/data", "", "")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        *((source, "source of code") for source in ("codecontests", "apps", "codeforces", "taco")),
        *((f"searchR1_{name}", "search tools") for name in ("nq", "triviaqa", "hotpotqa", "bamboogle")),
    ],
)
def test_sources_of_verls_that_need_more_than_a_text_are_refused_by_name(source, reason):
    with pytest.raises(ConfigError, match=rf"{source}.*{reason}.*set custom_reward_function.path"):
        default_compute_score(source, "", "")
