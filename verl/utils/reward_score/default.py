"""The rules that come with the project, chosen by `data_source`."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from verl.utils.config import ConfigError

MATH_TIMEOUT_S = 5
NUMBER = r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
GSM8K_ANSWER = re.compile(rf"####\s*\$?\s*({NUMBER})")


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 for a right answer, else 0.0. Raises ConfigError for a `data_source` that has no rule here."""
    rule = RULES.get(data_source)
    if rule is None:
        raise ConfigError(
            f"there is no built-in reward for data_source {data_source!r} (there is for {', '.join(known_sources())}): "
            "set custom_reward_function.path to a file that defines compute_score"
        )
    return float(rule(solution_str, str(ground_truth)))


def known_sources() -> list[str]:
    """The data sources that have a rule here."""
    return sorted(RULES)


def exact_match(solution: str, ground_truth: str) -> bool:
    return solution.strip() == ground_truth.strip()


def gsm8k(solution: str, ground_truth: str) -> bool:
    """The number after the last `####` equals the ground truth, which may itself be a worked solution."""
    answers = GSM8K_ANSWER.findall(solution)
    truths = GSM8K_ANSWER.findall(ground_truth) or [ground_truth]
    return bool(answers) and _number(answers[-1]) == _number(truths[-1])


def math(solution: str, ground_truth: str) -> bool:
    """The last mathematical answer in the text (LaTeX, boxed or plain) is equivalent to the ground truth."""
    from math_verify import parse, verify  # loads sympy

    # math-verify's time limits are signals, which only the main thread may set.
    limit_s = MATH_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    truth = parse(ground_truth, parsing_timeout=limit_s) or parse(f"${ground_truth}$", parsing_timeout=limit_s)
    try:
        return bool(verify(truth, parse(solution, parsing_timeout=limit_s), timeout_seconds=limit_s))
    except Exception:  # noqa: BLE001 - a response that the library stumbles over is no right answer
        return False


def _number(text: str) -> str | Decimal:
    """The number that `text` is, exactly: floats would take 12345678901234567890123 for its neighbours."""
    cleaned = text.strip().replace(",", "").replace("$", "")
    try:
        number = Decimal(cleaned)
    except InvalidOperation:
        return cleaned
    return number if number.is_finite() else cleaned


RULES: dict[str, Callable[[str, str], bool]] = {
    "builtin/arithmetic": exact_match,
    "openai/gsm8k": gsm8k,
    **dict.fromkeys(
        (
            "lighteval/MATH",
            "DigitalLearningGmbH/MATH-lighteval",
            "HuggingFaceH4/MATH-500",
            "HuggingFaceH4/aime_2024",
            "math_dapo",
            "aime",
        ),
        math,
    ),
}
