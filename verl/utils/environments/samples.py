"""Samples of an environment in verl's schema, and the entry of its agent loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.utils.config import ConfigError
from verl.utils.environments.source import Source

ENTRY_FILE = "agents.yaml"
LOOP = "verl.experimental.agent_loop.verifiers_agent:VerifiersAgentLoop"
MOST_HELD_OUT = 100
"""Unless another number is asked for."""


def environment_samples(source: Source, limit: int, test_size: int | None) -> dict[str, list[dict[str, Any]]]:
    """{train, test}: of each at most `limit`. Without samples for evaluation the last `test_size` of train are held
    out (None: a tenth, at most 100). Raises ConfigError if train or test is left without any."""
    rows = source.rows(limit)
    train = [row for row in rows if row["split"] == "train"]
    test = [row for row in rows if row["split"] == "test"]
    if not test:
        count = min(MOST_HELD_OUT, max(1, len(train) // 10)) if test_size is None else test_size
        train, test = train[: len(train) - count], train[len(train) - count :]
    if not train or not test:
        raise ConfigError(
            f"the environment {source.environment} has {len(rows)} samples, which leaves {len(train)} for training and "
            f"{len(test)} for evaluation"
        )
    return {"train": _samples(source, train, "train"), "test": _samples(source, test, "test")}


def entry(source: Source) -> dict[str, Any]:
    """For `agent_loop_config_path`."""
    return {
        "name": source.loop_name,
        "_target_": LOOP,
        "environment": source.environment,
        "arguments": dict(source.arguments),
        "python": source.python,
    }


def _samples(source: Source, rows: Sequence[dict[str, Any]], split: str) -> list[dict[str, Any]]:
    return [
        {
            "data_source": source.loop_name,
            "agent_name": source.loop_name,
            "prompt": row["prompt"],
            "ability": "environment",
            "reward_model": {"style": "environment", "ground_truth": row["truth"]},
            "extra_info": {
                "split": split,
                "index": row["index"],
                "environment_split": row["split"],
                "digest": row["digest"],
            },
        }
        for row in rows
    ]
