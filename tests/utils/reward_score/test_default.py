import threading

import pytest

from verl.utils.config import ConfigError
from verl.utils.reward_score import default_compute_score


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
        ("#### $-3.50", "-3.5", 1.0),
        ("#### 7, no: #### 12", "work #### 12", 1.0),
        ("#### 13", "12", 0.0),
        ("#### 12345678901234567890123", "12345678901234567890123", 1.0),
        ("#### 12345678901234567890123", "12345678901234567890124", 0.0),
        ("#### 9007199254740993", "9007199254740992", 0.0),
        ("#### 12,345,678,901,234,567,890,123.0", "12345678901234567890123", 1.0),
        ("#### 0.30000000000000000001", "0.3", 0.0),
        ("#### " + "9" * 5000, "1" * 5000, 0.0),
        ("#### 5", "NaN", 0.0),
        ("#### 5", "Infinity", 0.0),
        ("12", "12", 0.0),
    ],
)
def test_gsm8k_takes_the_number_after_the_last_mark(solution, truth, score):
    assert default_compute_score("openai/gsm8k", solution, truth) == score


@pytest.mark.parametrize(
    ("solution", "score"),
    [(r"so it is \boxed{\frac{1}{2}}", 1.0), ("the answer is $0.5$", 1.0), ("$0.6$", 0.0), ("", 0.0)],
)
def test_math_compares_values_not_texts(solution, score):
    assert default_compute_score("HuggingFaceH4/MATH-500", solution, r"\frac{1}{2}") == score


@pytest.mark.parametrize(("truth", "score"), [("12345678901234567890123", 1.0), ("12345678901234567890124", 0.0)])
def test_math_compares_integers_exactly(truth, score):
    assert default_compute_score("math_dapo", r"\boxed{12345678901234567890123}", truth) == score


@pytest.mark.parametrize("solution", ["{" * 3000, r"\boxed{" * 500, "\ud800 $5$", "$1/0$", "$" * 999, r"$\frac{}{}$"])
def test_no_response_makes_math_raise(solution):
    assert default_compute_score("math_dapo", solution, "7") == 0.0


def test_math_works_outside_the_main_thread():
    scores = []
    thread = threading.Thread(target=lambda: scores.append(default_compute_score("math_dapo", "$34$", "34")))
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_a_data_source_without_a_rule_says_what_to_set():
    with pytest.raises(ConfigError, match=r"data_source 'my/data'.*set custom_reward_function.path"):
        default_compute_score("my/data", "", "")
