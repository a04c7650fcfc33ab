"""An environment of one turn, with samples of its own for evaluation."""

import random
from typing import Any

import verifiers as vf
from datasets import Dataset


def samples(count: int, seed: int) -> Dataset:
    draw = random.Random(seed)
    pairs = [(draw.randint(0, 9), draw.randint(0, 9)) for _ in range(count)]
    return Dataset.from_list([{"question": f"{a}+{b}=?", "answer": str(a + b)} for a, b in pairs])


async def is_right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"].strip() == answer)


async def length(completion: Any) -> float:
    return float(len(completion[-1]["content"]))


def load_environment(count: int = 200, seed: int = 0) -> vf.Environment:
    rubric = vf.Rubric(funcs=[is_right])
    rubric.add_metric(length)
    return vf.SingleTurnEnv(dataset=samples(count, seed), eval_dataset=samples(50, seed + 1), rubric=rubric)
