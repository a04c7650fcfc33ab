"""The built-in rules, chosen by `data_source`; sources and scores are verl's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.utils.config import ConfigError
from verl.utils.reward_score import geo3k, gsm8k, math_dapo, math_reward, math_verify

REMEDY = "set custom_reward_function.path to a file that defines compute_score"
Rule = Callable[[str, str], float | dict[str, Any]]


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """The score of one response by the rule of `data_source`, or a dict with it under `score`.

    The arguments on a sandbox are verl's, for sources of code, which have no rule here. Raises ConfigError for a
    `data_source` without a rule, and for a sample without a ground truth.
    """
    rule = rule_for(data_source)
    if rule is None:
        raise ConfigError(no_rule(f"data_source {data_source!r}", data_source))
    if ground_truth is None:
        raise ConfigError(
            f"a sample of data_source {data_source!r} has no ground truth to compare with: the column reward_model "
            f"needs ground_truth, or {REMEDY}"
        )
    return rule(solution_str, str(ground_truth))


def rule_for(data_source: str) -> Rule | None:
    """The rule of a data source, or None."""
    if data_source.startswith(AIME):
        return math_dapo.compute_score
    return RULES.get(data_source)


def no_rule(what: str, data_source: str) -> str:
    """The error for a `data_source` without a rule, with the remedy; `what` is its name in the message."""
    reason = REFUSED.get(SEARCH if data_source.startswith(SEARCH) else data_source)
    known = reason or f"there is for {', '.join(known_sources())}"
    return f"there is no built-in reward for {what} ({known}): {REMEDY}"


def known_sources() -> list[str]:
    """The data sources with a rule here; a star stands for any ending."""
    return sorted([*RULES, f"{AIME}*"])


def exact_match(solution: str, ground_truth: str) -> float:
    return float(solution.strip() == ground_truth.strip())


def same_value(solution: str, ground_truth: str) -> float:
    """1 if the last box has the ground truth's text, or the last answer has its value, else 0."""
    return math_reward.compute_score(solution, ground_truth) or math_verify.compute_score(solution, ground_truth)


AIME = "aime"
SEARCH = "searchR1_"
_CODE = "it is a source of code, whose rule runs what the response says in a sandbox; there is none here"
REFUSED = {
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), _CODE),
    SEARCH: "it is a source for search tools, and those have no rule here",
}
"""verl's data source, or its beginning -> why it has no rule here."""

RULES: dict[str, Rule] = {
    "builtin/arithmetic": exact_match,
    "builtin/shapes": exact_match,
    "openai/gsm8k": gsm8k.compute_score,
    "hiyouga/geometry3k": geo3k.compute_score,
    **dict.fromkeys(
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), math_reward.compute_score
    ),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), math_dapo.compute_score),
    **dict.fromkeys(
        (
            "HuggingFaceH4/aime_2024",
            "numina_aops_forum",
            "numina_synthetic_math",
            "numina_amc_aime",
            "numina_synthetic_amc",
            "numina_cn_k12",
            "numina_olympiads",
        ),
        same_value,
    ),
}
