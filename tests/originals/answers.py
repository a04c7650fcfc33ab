"""Odd answers to problems of mathematics, and truths: every answer is held against several truths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

TRUTHS = ("34", "-3", "1/2", r"\frac{1}{2}", "0.5", "1,000", "1000", r"\sqrt{3}", "(1,2)", r"x^2+1", "A", "3.5", "")
MORE_TRUTHS = (
    *(
        "0",
        "00",
        "-0",
        "+34",
        " 34 ",
        "34\n",
        "34.",
        "34.0",
        "3.50",
        "0.333",
        "1e3",
        "10^3",
        "x=34",
        "$34$",
        "{34}",
        "34 cm",
    ),
    *(
        r"34\%",
        "12%",
        r"\$5",
        "No",
        "None",
        "\uff11\uff12",
        "1,2",
        "[1,2)",
        "3 1/2",
        "a_1",
        "#### 34",
        r"\boxed{34}",
        "{",
        "(",
    ),
    *(
        "\\",
        r"\frac",
        r"\frac{3}{4}",
        r"-\frac{1}{2}",
        r"\dfrac12",
        r"2\sqrt{3}",
        r"\pi/2",
        r"\infty",
        "\u2205",
        r"90^\circ",
    ),
    *(r"\text{A}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
)
VALUES = (
    *(
        "34",
        " 34 ",
        "034",
        "34.0",
        "+34",
        "-3",
        "\u22123",
        "- 3",
        "1/2",
        "-1/2",
        "2/4",
        " 1 / 2",
        r"\frac12",
        r"\frac{1}{2}",
    ),
    *(r"\dfrac{1}{2}", r"\tfrac12", r"\frac{1}2", r"\frac 1 2", r"-\frac{1}{2}", "0.5", ".5", "0.50", "1,000", "1000"),
    *("1{,}000", r"1,\!000", "1 000", "10^3", "1e3", r"\sqrt3", r"\sqrt{3}", r"\sqrt 3", "\u221a3", "(1,2)", "(1, 2)"),
    *(r"\left(1,2\right)", r"\left( 1, 2 \right]", "x^2+1", "x^{2}+1", "x = 34", "x=34", "xyz = 34", "a = b = 34"),
    *(
        "34 cm",
        r"34\text{ cm}",
        r"34 \text{ cm}",
        r"34\mathrm{cm}",
        r"34 \text{cm}^2",
        r"34^\circ",
        r"34^{\circ}",
        "34%",
    ),
    *(r"34\%", r"\$34", "$34$", "$34", "34 dollars", "34 degrees", "34 units", "A", "(A)", r"\text{A}", r"\textbf{A}"),
    *(r"\text{(A)}", "a", "34.", "34,", "34!", "thirty-four", "\u0663\u0664", "\uff13\uff14", "34\u00a0", "3\u200b4"),
    *("9" * 60, "-" + "9" * 60, "3.5", "3,5", r"3\frac{1}{2}", r"\overline{34}", r"\mbox{34}", r"\boxed{34}", "{34}"),
    *(
        "{{34}",
        "34}",
        r"\{34\}",
        "34 or 35",
        "33, 34",
        "34\n35",
        "",
        " ",
        "\\",
        r"\frac",
        r"\sqrt",
        r"\frac{",
        "=",
        "#",
    ),
)
WAYS = (
    *(
        "{}",
        "#### {}",
        "####{}",
        "The answer is {}.",
        "Answer: {}",
        "answer : {}",
        "Answer: ${}$",
        "Answer: {}\nand so on",
    ),
    *(r"\boxed{<>}", r"So $\boxed{<>}$.", r"\boxed{\boxed{<>}}", r"\boxed{<>", r"\boxed <>$ it is", r"\fbox{<>}"),
    *(r"\boxed{1} then \boxed{<>}", r"\boxed{<>} then \boxed{1}", "Answer: 1\nAnswer: {}", "Answer: {}\nAnswer: 1"),
    *("Answer: 1\n\\boxed{<>}", "Answer: {}\n\\boxed{1}", "\\boxed{1}\nAnswer: {}", "Answer:\n\\boxed{<>}"),
    *("Answer: \\boxed{<>}", "#### 1\n#### {}", "#### {}\n#### 1", "#### {} apples", "\\boxed {<>}", "\\boxed\n{<>}"),
)
PADDING = ("", " " * 120, "." * 320)
"""Behind an answer: the built-in rules read only so far from the end."""


def responses() -> list[str]:
    """Every value in every way, and some with a long end."""
    whole = [_in(way, value) for way, value in itertools.product(WAYS, VALUES)]
    padded = [text + end for text, end in itertools.product(whole[:: len(VALUES) // 3], PADDING[1:])]
    return [*whole, *padded]


def cases(source: str, step: int = 1, truths: Sequence[str] = TRUTHS) -> list[tuple[str, str, str]]:
    """(source, response, truth): every `step`-th of all pairs."""
    pairs = list(itertools.product(responses(), truths))
    return [(source, response, truth) for response, truth in pairs[::step]]


def _in(way: str, value: str) -> str:
    return way.replace("<>", value) if "<>" in way else way.replace("{}", value)
