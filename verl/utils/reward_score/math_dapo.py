r"""DAPO's mathematics: +1 or -1 for the last line `Answer: ...` (arXiv:2503.14476), compared as text after the
normalisation of Minerva (Lewkowycz et al. 2022, arXiv:2206.14858, appendix)."""

from __future__ import annotations

import re
from typing import Any

from verl.utils.reward_score.math_reward import closed, remove_boxed

READ_CHARACTERS = 300
"""The number of last characters of a response that are searched."""
READ_CHARACTERS_FOR_BOX = 100
NO_ANSWER = "[INVALID]"
ANSWER = r"(?i)Answer\s*:\s*([^\n]+)"

_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue"),
    *("points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges"),
    *("students", "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2"),
    *("\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"'),
    "\\dots",
)
_UNWRAPPED = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
)


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> dict[str, Any]:
    r"""`score` is 1.0 or -1.0, `acc` whether the answer is right, `pred` the extracted answer.

    Without a line `Answer: ...`, or with `strict_box_verify`, the answer is the exact content of the last
    `\boxed{...}`. `pause_tokens_index` is verl's and is for another way of generating: it has to be None.
    """
    if pause_tokens_index is not None:
        raise ValueError("pause_tokens_index: responses have no pause tokens here")
    end, truth = solution_str[-READ_CHARACTERS:], str(ground_truth)
    correct, prediction = boxed = _in_box(end, truth)
    if not strict_box_verify:
        correct, prediction = is_correct_minerva(end, truth)
        if prediction == NO_ANSWER and boxed[1] is not None:
            correct, prediction = boxed
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": prediction}


def is_correct_minerva(solution_str: str, gt: str, answer_pattern: str = ANSWER) -> tuple[bool, str]:
    """Whether the last answer of a text is `gt`, and that answer; both are normalised."""
    found = re.findall(answer_pattern, solution_str)
    prediction = normalize_final_answer(found[-1]) if found else NO_ANSWER
    return prediction == normalize_final_answer(gt), prediction


def last_boxed_only_string(string: str) -> str | None:
    r"""The last `\boxed{...}` of a text with its braces, None where there is none or it is not closed."""
    return closed(string, string.rfind("\\boxed{"))


def normalize_final_answer(final_answer: str) -> str:
    r"""The normal form: the text after the last `=`, without units, spaces and dollar signs; `frac{a}{b}` for `fracab`;
    no commas in integers."""
    text = final_answer.split("=")[-1]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for part in _REMOVED:
        text = text.replace(part, "")
    for pattern, replacement in _UNWRAPPED:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def _in_box(solution: str, truth: str) -> tuple[bool, str | None]:
    boxed = last_boxed_only_string(solution[-READ_CHARACTERS_FOR_BOX:])
    prediction = None if boxed is None else remove_boxed(boxed)
    return prediction == truth, prediction
