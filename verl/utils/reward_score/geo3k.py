"""Geometry3K: the form that a response is asked for, and whether what it boxes last is the truth.

verl's weights and form. Its rule compares by mathruler, which evaluates what the model wrote as Python; here texts are
compared as for MATH, then values by math-verify.
"""

from __future__ import annotations

import re

from verl.utils.reward_score import math_reward, math_verify

FORM = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def format_reward(predict_str: str) -> float:
    """1 for a response that thinks first and boxes something after it, else 0."""
    return float(FORM.fullmatch(predict_str) is not None)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """1 if the last box, or with `use_boxed=False` the whole response, is equivalent to the ground truth, else 0."""
    answer = predict_str
    if use_boxed:
        box = math_reward.last_boxed_only_string(predict_str)
        if box is None or not box.startswith("\\boxed{"):
            return 0.0
        answer = math_reward.remove_boxed(box)
    answer, truth = _plain(answer), _plain(ground_truth)
    if not answer:
        return 0.0
    same = math_reward.is_equiv(answer, truth)
    return 1.0 if same else math_verify.compute_score(f"\\boxed{{{answer}}}", truth)


def _plain(text: str) -> str:
    """Without dollars around it, and without what says that it is text."""
    return re.sub(r"^\\(?:text|mathrm)\{(.*)\}$", r"\1", text.strip().strip("$").strip(), flags=re.DOTALL).strip()


def compute_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """`format_score` for the form, and the rest for the answer."""
    right = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * right + format_score * format_reward(predict_str)
