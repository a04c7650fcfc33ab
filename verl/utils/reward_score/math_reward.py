r"""MATH: the last `\boxed{...}`, compared as text after the normalisation of the data set (Hendrycks et al. 2021,
arXiv:2103.03874)."""

from __future__ import annotations

import re
from typing import Any

_LEFT_OUT = ("\n", "\\!")
_DECORATION = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")
_UNIT = "\\text{ "
_BARE_ROOT = re.compile(r"\\sqrt([^{])")
_BARE_FRACTION = re.compile(r"\\frac([^{])(.)")
_SLASH = re.compile(r"(-?\d+)/(-?\d+)")
_LONGEST_NAME = 2
"""Of what stands before `=` in an answer like `k = 3`."""


def compute_score(solution_str: str, ground_truth: Any) -> float:
    """1 if the last box holds the ground truth, else 0."""
    boxed = last_boxed_only_string(solution_str)
    if boxed is None or not boxed.startswith(("\\boxed ", "\\boxed{")):
        return 0.0
    return float(is_equiv(remove_boxed(boxed), str(ground_truth)))


def last_boxed_only_string(string: str) -> str | None:
    r"""The last `\boxed{...}` of a text with its braces; else its last `\fbox{...}`; None where neither is closed.

    `\boxed 3$` goes up to the dollar sign, and counts before a box with braces.
    """
    before, bare, rest = string.rpartition("\\boxed ")
    if bare:
        return bare + rest.split("$")[0]
    return closed(string, string.rfind("\\boxed" if "\\boxed" in string else "\\fbox"))


def closed(string: str, start: int) -> str | None:
    """The text from `start` to the brace that closes the first one; None for a start of -1, or without such a brace."""
    depth = 0
    for position in range(start, len(string)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(string[position], 0)
        if string[position] == "}" and depth == 0:
            return string[start : position + 1]
    return None


def remove_boxed(s: str) -> str:
    r"""The content of a `\boxed{...}`. Raises ValueError for anything else."""
    if s.startswith("\\boxed "):
        return s.removeprefix("\\boxed ")
    if s.startswith("\\boxed{") and s.endswith("}"):
        return s[len("\\boxed{") : -1]
    raise ValueError(f"not a box: {s[:80]!r}")


def is_equiv(str1: str | None, str2: str | None) -> bool:
    """Whether two answers are the same text after normalisation. Two missing answers are the same."""
    if str1 is None or str2 is None:
        return str1 is None and str2 is None
    try:
        return strip_string(str1) == strip_string(str2)
    except ValueError:
        return str1 == str2


def strip_string(string: str) -> str:
    r"""The normal form: no spaces, units, degrees, percent signs; `\frac{1}{2}` for `\dfrac12`, `1/2`, `0.5`.

    Raises ValueError for more than one unit.
    """
    text = _without(string, _LEFT_OUT).replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    text = _without(text, _DECORATION)
    if _UNIT in text:
        text, *others = text.split(_UNIT)
        if len(others) > 1:
            raise ValueError(f"more than one unit: {string!r}")
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = f"0{text}"
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= _LONGEST_NAME:
        text = sides[1]
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text).replace(" ", "")
    text = _BARE_FRACTION.sub(_with_braces, text)
    if text == "0.5":
        text = "\\frac{1}{2}"
    if (slash := _SLASH.fullmatch(text)) and all(str(int(part)) == part for part in slash.groups()):
        text = "\\frac{{{}}}{{{}}}".format(*slash.groups())
    return text


def _with_braces(fraction: re.Match[str]) -> str:
    above, below = fraction.groups()
    return f"\\frac{{{above}}}" + (below if below == "{" else f"{{{below}}}")


def _without(text: str, parts: tuple[str, ...]) -> str:
    for part in parts:
        text = text.replace(part, "")
    return text
