"""Writes data/train.parquet and data/test.parquet: a row for each prompt. Put your own prompts and answers here."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HELD_OUT = 128
"""Rows for validation. None of them is trained on."""


def problems():
    """(question, answer) pairs."""
    numbers = range(10, 100)
    return [(f"{left}+{right}=", str(left + right)) for left in numbers for right in numbers]


def row(question, answer, index):
    return {
        "data_source": "my/additions",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index},
    }


def main():
    pairs = problems()
    random.Random(0).shuffle(pairs)
    rows = [row(question, answer, index) for index, (question, answer) in enumerate(pairs)]
    data = Path(__file__).parent / "data"
    data.mkdir(exist_ok=True)
    for name, part in {"test": rows[:HELD_OUT], "train": rows[HELD_OUT:]}.items():
        pq.write_table(pa.Table.from_pylist(part), data / f"{name}.parquet")
        print(f"{data / name}.parquet: {len(part)} rows")


if __name__ == "__main__":
    main()
