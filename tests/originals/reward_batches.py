"""What reward managers give: {tokenizer, batches, cases} comes in as JSON, a list of results goes out.

Run as a file with PyPI's verl or this project in front. A row of a batch is [token ids, `reward_model`, further
columns]; a case is (batch, manager, options of the overlong buffer, function), and the function is the data source. A
result is {rewards, infos}, the second a dict per sample, or {error}. verl has two managers of most names: those of its
trainers, and those that a script can make itself, which have `old ` before their names here.
"""

import asyncio
import contextlib
import importlib
import json
import logging
import sys
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from importlib import util
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from verl.protocol import DataProto

OF_VERL = util.find_spec("verl.experimental.reward_loop.reward_loop") is not None
PROMPT, WIDTH = 3, 8
EXPERIMENT = "a name"


def number(**given: Any) -> Any:
    return len(given["solution_str"]) / 4


def seen(**given: Any) -> Any:
    """Every argument, as text."""
    return {"score": 0.5, "seen": json.dumps(given, sort_keys=True, default=str)}


def rated(**given: Any) -> Any:
    right = given["solution_str"].strip() == str(given["ground_truth"])
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": given["solution_str"][:3]}


def of_some(**given: Any) -> Any:
    return {"score": 1, **({"long": True} if len(given["solution_str"]) > 2 else {"short": 0})}


def raising(**given: Any) -> Any:
    raise ValueError(given["solution_str"])


FUNCTIONS: dict[str, Any] = {
    "number": number,
    "whole number": lambda **given: len(given["solution_str"]),
    "truth": lambda **given: given["solution_str"].startswith("1"),
    "number of numpy": lambda **given: np.float32(len(given["solution_str"])),
    "seen": seen,
    "rated": rated,
    "of some": of_some,
    "raising": raising,
    "without a score": lambda **_: {"acc": 1.0},
    "nothing": lambda **_: None,
    "text": lambda **_: "0.5",
    "no number": lambda **_: float("nan"),
    "infinite": lambda **_: {"score": float("inf")},
}


def chosen(**given: Any) -> Any:
    """The function of the data source's name: one manager can be asked for all of them."""
    return FUNCTIONS[given["data_source"]](**given)


NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")


def in_order(*given: Any) -> Any:
    """As the manager `prime` calls it."""
    return chosen(**dict(zip(NAMES, given, strict=True)))


def several(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> list[Any]:
    """As the manager `batch` calls it: with all samples at once."""
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [in_order(*row) for row in rows]


def made(rows: list[Any], function: str, padding: int) -> DataProto:
    ids = [row[0] for row in rows]
    tensors = {
        "prompts": torch.ones(len(ids), PROMPT, dtype=torch.long),
        "responses": torch.tensor([row + [padding] * (WIDTH - len(row)) for row in ids]),
        "attention_mask": torch.tensor([[0] + [1] * (PROMPT - 1 + len(row)) + [0] * (WIDTH - len(row)) for row in ids]),
    }
    columns: dict[str, list[Any]] = {"data_source": [function] * len(rows), "reward_model": [row[1] for row in rows]}
    for name in dict.fromkeys(name for row in rows for name in row[2]):
        columns[name] = [deepcopy(row[2].get(name)) for row in rows]  # gdpo writes into them
    if not OF_VERL and (fields := columns.pop("tool_extra_fields", None)):
        scores = columns.pop("reward_scores")
        columns["__extra_fields__"] = [{**one, "reward_scores": of} for one, of in zip(fields, scores, strict=True)]
    objects = {name: np.array([*values, None], dtype=object)[:-1] for name, values in columns.items()}
    return DataProto.from_dict(tensors, objects)


def by_sample(infos: dict[str, Any], rows: int) -> list[dict[str, Any]]:
    values = {key: list(column) for key, column in infos.items()}
    assert all(len(column) == rows for column in values.values()), f"uneven {list(values)}"
    return [{key: plain(values[key][row]) for key in values if values[key][row] is not None} for row in range(rows)]


def plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic | torch.Tensor) else value


class Loop:
    """A manager of verl's trainers."""

    def __init__(self, name: str, buffer: dict[str, Any], tokenizer: Any) -> None:
        from omegaconf import OmegaConf

        registered = importlib.import_module("verl.experimental.reward_loop.reward_manager").__dict__
        kwargs = {"max_resp_len": WIDTH, "overlong_buffer_cfg": buffer}
        config = OmegaConf.create(
            {
                "reward": {"reward_kwargs": kwargs},
                "data": {"reward_fn_key": "data_source"},
                "trainer": {"experiment_name": EXPERIMENT},
            }
        )
        self._class = registered["get_reward_manager_cls"](name)
        self._class.init_class(config, tokenizer)
        asyncio.set_event_loop(asyncio.new_event_loop())  # the manager keeps it
        self._manager = self._class(config, tokenizer, chosen)

    def __call__(self, data: DataProto) -> Any:
        results = self._manager.loop.run_until_complete(self._every(data))
        rewards = self._class.assemble_rm_scores(data, [result["reward_score"] for result in results])
        infos = [{key: plain(value) for key, value in result["reward_extra_info"].items()} for result in results]
        return {"rewards": rewards.tolist(), "infos": infos}

    async def _every(self, data: DataProto) -> list[Any]:
        return [await self._manager.run_single(data[row : row + 1]) for row in range(len(data))]


class Old:
    """One of verl's that a script makes itself."""

    def __init__(self, name: str, buffer: dict[str, Any], tokenizer: Any) -> None:
        from omegaconf import OmegaConf

        made: Any = importlib.import_module("verl.workers.reward_manager").__dict__["get_reward_manager_cls"](name)
        more = {"max_resp_len": WIDTH, "overlong_buffer_cfg": OmegaConf.create(buffer)} if name == "dapo" else {}
        calls = {"batch": several, "prime": in_order}
        if name == "prime":
            prime: Any = importlib.import_module("verl.workers.reward_manager.prime")
            prime.ProcessPoolExecutor = lambda max_workers: ProcessPoolExecutor(1)  # of 64, at each call
        self._manager = made(tokenizer, 0, compute_score=calls.get(name, chosen), **more)

    def __call__(self, data: DataProto) -> Any:
        with contextlib.redirect_stdout(sys.stderr):
            result = self._manager(data, return_dict=True)
        infos = by_sample(result.get("reward_extra_info", {}), len(data))
        return {"rewards": result["reward_tensor"].tolist(), "infos": infos}


class Ours:
    def __init__(self, name: str, buffer: dict[str, Any], tokenizer: Any) -> None:
        from verl.workers.config.algorithm import OverlongBufferConfig, RewardKwargsConfig, RewardModelConfig
        from verl.workers.reward_manager import NaiveRewardManager, get_reward_manager_cls, overlong_penalty

        made: Any = get_reward_manager_cls("naive" if name == "batch" else name)  # which is what to do instead
        assert made is NaiveRewardManager
        kwargs = RewardKwargsConfig(overlong_buffer_cfg=OverlongBufferConfig(**buffer))
        penalty = overlong_penalty(RewardModelConfig(reward_manager=name, reward_kwargs=kwargs), WIDTH)
        told = {"experiment_name": EXPERIMENT} if name == "gdpo" else {}
        self._manager = made(tokenizer, chosen, penalty=penalty, told=told)

    def __call__(self, data: DataProto) -> Any:
        result = self._manager(data)
        return {"rewards": result.reward_tensor.tolist(), "infos": by_sample(result.extra_info, len(data))}

    def close(self) -> None:
        self._manager.close()


def manager(name: str, buffer: dict[str, Any], tokenizer: Any) -> Any:
    kind = name.removeprefix("old ")
    made: Any = Ours if not OF_VERL else Loop if kind == name else Old
    return made(kind, buffer, tokenizer)


def found(manager: Any, data: DataProto) -> Any:
    try:
        return manager(data)
    except Exception as exc:  # noqa: BLE001 - that it raises is a result, too
        return {"error": f"{type(exc).__name__}: {exc}"[:300]}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    given = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(given["tokenizer"])
    managers: dict[str, Any] = {}
    results = []
    for batch, name, buffer, function in given["cases"]:
        one = managers.setdefault(json.dumps([name, buffer]), None) or manager(name, buffer, tokenizer)
        managers[json.dumps([name, buffer])] = one
        results.append(found(one, made(given["batches"][batch], function, tokenizer.pad_token_id)))
    for one in managers.values():
        if isinstance(one, Ours):
            one.close()
    sys.stdout.write("\n" + json.dumps(results))
