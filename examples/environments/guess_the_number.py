"""An environment of several turns: the policy guesses, and hears whether the number is higher or lower."""

import random
import re
from typing import Any

import verifiers as vf
from datasets import Dataset

QUESTION = "I think of a number from 1 to 9. Guess it."


class Guessing(vf.MultiTurnEnv):
    @vf.stop
    async def is_guessed(self, state: vf.State) -> bool:
        return bool(state["trajectory"]) and guess_of(state["trajectory"][-1]["completion"]) == int(state["answer"])

    async def env_response(self, messages: Any, state: vf.State, **_: Any) -> Any:
        guess = guess_of(messages)
        if guess is None:
            return [{"role": "user", "content": "Say a number."}]
        return [{"role": "user", "content": "Higher." if guess < int(state["answer"]) else "Lower."}]


def guess_of(messages: Any) -> int | None:
    found = re.search(r"\d+", messages[-1]["content"] or "")
    return int(found.group()) if found else None


async def soon(completion: Any, answer: str, state: vf.State) -> float:
    """1 for the first guess, less for later ones, 0 for none."""
    return 1 / len(state["trajectory"]) if guess_of(completion) == int(answer) else 0.0


def load_environment(max_turns: int = 4, count: int = 100, seed: int = 0) -> vf.Environment:
    draw = random.Random(seed)
    rows = [{"question": QUESTION, "answer": str(draw.randint(1, 9))} for _ in range(count)]
    return Guessing(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[soon]), max_turns=max_turns)
