"""A reward function with partial credit.

python -m verl.trainer.main_ppo custom_reward_function.path=examples/custom_reward.py \
    +custom_reward_function.reward_kwargs.partial_credit=0.2
"""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"-?\d+")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    partial_credit: float = 0.1,
) -> dict[str, Any]:
    """1 for exactly the right answer, `partial_credit` for the right number among other text, else 0.

    `score` is the reward. The other numbers become the metrics `reward_extra/<name>/mean` and
    `val-aux/<data_source>/<name>/mean@n`; `pred`, the answer that was understood, is for majority votes in validation.
    """
    numbers = NUMBER.findall(solution_str)
    prediction = numbers[-1] if numbers else ""
    exact = solution_str.strip() == ground_truth.strip()
    right_number = prediction == ground_truth.strip()
    return {
        "score": 1.0 if exact else partial_credit if right_number else 0.0,
        "right_number": right_number,
        "pred": prediction,
    }
