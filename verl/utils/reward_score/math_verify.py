"""Mathematics by value, not by text: `math-verify` decides whether two expressions are equivalent."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 5


def compute_score(model_output: str, ground_truth: Any, timeout_score: float = 0.0) -> float:
    """1 if the last answer in the text (LaTeX, boxed or plain) is equivalent to the ground truth, else 0.

    `timeout_score` if the library takes too long, which it only notices in a main thread.
    """
    parse, verify, timeout = _library()
    # math-verify's time limits are signals, which only the main thread may set.
    limit_s = TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    truth = str(ground_truth)
    # In a box: of plain text the library takes the last number, which of "3 \\sqrt{5}" is another answer.
    forms = ([] if "\\boxed" in truth else [f"\\boxed{{{truth}}}"]) + [truth, f"${truth}$"]
    gold: Any = next((found for form in forms if (found := parse(form, parsing_timeout=limit_s))), [])
    try:
        return float(verify(gold, parse(model_output, parsing_timeout=limit_s), timeout_seconds=limit_s))
    except timeout:
        return timeout_score
    except Exception:  # noqa: BLE001 - a response that the library stumbles over is no right answer
        return 0.0


@functools.cache
def _library() -> tuple[Callable[..., Any], Callable[..., Any], type[Exception]]:
    """Its functions, and what they raise. Its first parse in a process builds grammars and loads sympy, which on a busy
    host takes seconds that no answer is to blame for."""
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    parse("$1$", parsing_timeout=None)
    return parse, verify, TimeoutException
