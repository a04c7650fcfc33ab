"""`DataProto` against PyPI's verl: the same operations on the same batches give the same, or fail in both."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest
import torch

from tests.originals.original import OURS, VERL, computed, differences

ROWS = 6


def batch(seed: int, rows: int = ROWS, **changes: Any) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    whole = {
        "tensors": {
            "ids": torch.randint(0, 99, (rows, 4), generator=draw).tolist(),
            "scores": torch.randn(rows, generator=draw).tolist(),
            "mask": (torch.rand(rows, 4, generator=draw) > 0.5).tolist(),
        },
        "objects": {"uid": [f"u{row % 4}" for row in range(rows)], "info": [{"row": row} for row in range(rows)]},
        "meta": {"temperature": 1.0, "eos": [1, 2]},
    }
    return {kind: {**values, **changes.get(kind, {})} for kind, values in whole.items()}


def without(described: dict[str, Any], *kinds: str) -> dict[str, Any]:
    return {kind: {} if kind in kinds else values for kind, values in described.items()}


BASE = batch(0)
OTHER = {"tensors": {"values": [[0.5]] * ROWS}, "objects": {"extra": [*"abcdef"]}, "meta": {"step": 3}}
BATCHES = {
    "base": BASE,
    "second": batch(1),
    "short": batch(2, rows=3),
    "objects only": without(BASE, "tensors"),
    "tensors only": without(BASE, "objects"),
    "empty": {"tensors": {}, "objects": {}, "meta": {}},
    "meta only": {"tensors": {}, "objects": {}, "meta": {"step": 3}},
    "other": OTHER,
    "same key, same value": {**OTHER, "tensors": {"ids": BASE["tensors"]["ids"]}},
    "same key, other value": {**OTHER, "tensors": {"ids": batch(1)["tensors"]["ids"]}},
    "same objects": {**OTHER, "objects": {"uid": BASE["objects"]["uid"]}},
    "other objects": {**OTHER, "objects": {"uid": [*"abcdef"]}},
    "other meta": {**OTHER, "meta": {"temperature": 0.5}},
    "second, other meta": batch(1, meta={"temperature": 0.5}),
    "second, more meta": batch(1, meta={"step": 3}),
    "metrics": batch(1, meta={"metrics": {"loss": 1.0, "time": [2.0]}}),
    "more metrics": batch(2, meta={"metrics": {"loss": 2.0, "time": [3.0]}}),
    "fewer keys": {**batch(1), "objects": {"uid": [*"abcdef"]}},
    "fewer tensors": {**batch(1), "tensors": {"ids": batch(1)["tensors"]["ids"]}},
    "one row": batch(3, rows=1),
    "padded": batch(4, rows=5, meta={"_padding_size": 2}),
}
NUMBERS = {name: number for number, name in enumerate(BATCHES)}


def on(name: str, *steps: list[Any]) -> list[list[Any]]:
    return [[step[0], NUMBERS[name], *step[1:]] for step in steps]


def joins() -> dict[str, list[list[Any]]]:
    bases = ("base", "objects only", "tensors only", "empty", "metrics")
    return {
        f"{name} {base} + {other}": on(base, [name, NUMBERS[other]])
        for name, base, other in itertools.product(("concat", "union"), bases, BATCHES)
    }


def cuts(name: str) -> dict[str, list[list[Any]]]:
    """Operations with a number, on the batch of this name."""
    found: dict[str, list[list[Any]]] = {f"repeat {name}": on(name, ["repeat"])}
    for number in (1, 2, 3, 4, 6, 7):
        steps: list[list[Any]] = [[step, number] for step in ("chunk", "split", "pad", "pad_and_unpad")]
        steps += [["repeat", number, interleave] for interleave in (True, False)]
        steps += [["padding", number, kind] for kind in ("first", "last")]
        found |= {" ".join(map(str, [step[0], name, *step[1:]])): on(name, step) for step in steps}
    return found


def choices(name: str) -> dict[str, list[list[Any]]]:
    """Operations that choose samples, on the batch of this name."""
    rows = ([5, 0, 0], [True, False, True, False, False, True], [], [-1], [6], [True, False])
    steps: list[list[Any]] = [
        *(["slice", *part] for part in ((0, 2, 1), (None, None, 2), (-2, None, None), (4, 1, None), (None, 99, None))),
        *(["item", row] for row in (0, -1, 5, 6)),
        *(["select_idxs", kind, each] for kind in ("list", "array", "tensor") for each in rows),
        *(["reorder", "tensor", each] for each in ([5, 4, 3, 2, 1, 0], [0, 0, 1, 1, 2, 2], [0, 1])),
        ["to_tensordict"],
        *(["iterate", size, epochs] for size, epochs in ((3, 2), (4, 1))),
        *(["sample_level_repeat", "tensor", times] for times in ([1, 0, 2, 1, 1, 3], [2] * 6, [1, 2])),
    ]
    return {" ".join(map(str, [step[0], name, *step[1:]])): on(name, step) for step in steps}


def names() -> dict[str, list[list[Any]]]:
    """Operations with the names of what a batch holds."""
    chosen: tuple[dict[str, list[str]], ...] = (
        {},
        {"batch_keys": ["ids"]},
        {"batch_keys": ["ids", "none"]},
        {"batch_keys": []},
        {"non_tensor_batch_keys": ["uid"]},
        {"non_tensor_batch_keys": ["none"]},
        {"meta_info_keys": ["eos"]},
        {"meta_info_keys": ["none"]},
        {"batch_keys": ["ids"], "non_tensor_batch_keys": ["uid"], "meta_info_keys": ["eos"]},
        {"batch_keys": ["ids", "scores", "mask"], "non_tensor_batch_keys": []},
    )
    pairs = (("ids", "tokens"), (["ids", "mask"], ["mask", "ids"]), (["ids"], ["a", "b"]), ("none", "x"))
    return {
        **{f"{name} {keys}": on("base", [name, keys]) for name, keys in itertools.product(("select", "pop"), chosen)},
        **{f"rename {old} {new}": on("base", ["rename", old, new]) for old, new in pairs},
    }


def cases() -> dict[str, list[list[Any]]]:
    found = joins() | names()
    for name in ("base", "short", "objects only", "tensors only", "one row", "empty"):
        found |= cuts(name) | choices(name)
    steps = ["repeat", 2, True], ["reorder", "tensor", [*range(11, -1, -1)]], ["slice", 2, 9, None]
    return found | {"chain": on("base", *steps), **{f"unpad {size}": on("base", ["unpad", size]) for size in (0, 2)}}


def sequences(draw: Random, count: int) -> dict[str, list[list[Any]]]:
    """Of up to eight operations in a row, each with arguments that fit what the ones before have left."""
    return {f"drawn {number}": on("base", *_sequence(draw)) for number in range(count)}


def _sequence(draw: Random) -> list[list[Any]]:
    steps: list[list[Any]] = [["union", NUMBERS[name]] for name in ("other", "same objects") if draw.random() < 0.3]
    length, keys = ROWS, ["ids", "scores", "mask"]
    for _ in range(draw.randint(1, 8)):
        step, length = _operation(draw, length, keys)
        steps.append(step)
    return steps


def _operation(draw: Random, length: int, keys: list[str]) -> tuple[list[Any], int]:
    """(the operation, how many samples it leaves)."""
    rows = [draw.randrange(-length, length) for _ in range(draw.randint(1, 9))]
    mask = [draw.random() < 0.5 for _ in range(length - 1)] + [True]
    size, times = draw.randint(1, 4), draw.randint(1, 3 if length < 30 else 1)
    kind = draw.choice(("list", "array", "tensor", "int32", "int32 tensor"))
    begin, step = draw.randrange(length), draw.choice((None, 1, 2))
    counts = [draw.randint(0, 2) for _ in range(length - 1)] + [1]
    part = draw.randrange(-(-length // size))
    key = draw.choice(keys)
    several = [
        (["repeat", times, draw.random() < 0.5], length * times),
        (["select_idxs", kind, rows], len(rows)),
        (["select_idxs", draw.choice(("list", "array", "tensor")), mask], sum(mask)),
        (["get", kind, rows], len(rows)),
        (["get", draw.choice(("list", "array", "tensor")), mask], sum(mask)),
        (["slice", begin, None, step], len(range(begin, length, step or 1))),
        (["reorder", "tensor", draw.sample(range(length), length)], length),
        (["pad_and_unpad", size], length),
        (["padded", size], -(-length // size) * size),
        (["part", "split", size, part], min(size, length - part * size)),
        (["to_tensordict"], length),
        (["select", {"batch_keys": [*keys]}], length),
        (["sample_level_repeat", draw.choice(("list", "array", "tensor")), counts], sum(counts)),
    ]
    if length < 30:
        several.append((["concat itself"], 2 * length))
    if length % size == 0:
        several.append((["part", "chunk", size, draw.randrange(size)], length // size))
    if len(keys) > 1 and draw.random() < 0.1:
        keys.remove(key)
        return ["without", key], length
    return draw.choice(several)


CASES = cases()
SEQUENCES = sequences(Random(0), 400)


@pytest.fixture(scope="module")
def both() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    every = CASES | SEQUENCES
    given = {"batches": [*BATCHES.values()], "cases": [*every.values()]}
    verls, ours = (computed("batch_operations.py", given, folder) for folder in (VERL, OURS))
    return dict(zip(every, zip(verls, ours, strict=True), strict=True))


def test_an_operation_on_a_batch_gives_what_verl_gives(both: dict[str, Any]) -> None:
    given = {name: (verls, ours) for name, (verls, ours) in both.items() if "value" in verls and "value" in ours}
    assert len(given) > 400
    differing = {name for name, (verls, ours) in given.items() if verls != ours}
    metrics = {name for name in given if name.startswith("concat") and "metrics" in name}
    assert differing == metrics
    assert differences()["`metrics` in the `meta_info` of joined batches"]["why"]
    assert given.keys() >= SEQUENCES.keys()


def test_what_verl_refuses_is_refused_unless_it_makes_sense(both: dict[str, Any]) -> None:
    """verl's operations stumble over a batch without tensors, and over no rows at all."""
    for name, (verls, ours) in both.items():
        if "error" in verls and "error" not in ours:
            assert (
                {"objects", "empty", "tensors", "meta"} & set(name.split())
                or name.endswith("[]")
                or name == "rename ['ids', 'mask'] ['mask', 'ids']"
            ), name
            assert verls["error"] in ("AttributeError", "IndexError", "TypeError", "ValueError"), name


def test_what_verl_does_without_a_word_and_we_refuse_is_listed(both: dict[str, Any]) -> None:
    listed = {
        "operations on no samples": lambda name: " empty" in name,
        "`concat` of batches with other keys": lambda name: name.startswith("concat objects only"),
        "`reorder` by what is no permutation": lambda name: name.startswith("reorder"),
        "`select` of keys that are not there": lambda name: name.startswith("select {") and "none" in name,
    }
    refused = {name for name, (verls, ours) in both.items() if "error" in ours and "error" not in verls}
    for difference, of in listed.items():
        assert differences()[difference]["why"]
        assert any(map(of, refused)), difference
    assert [name for name in refused if not any(of(name) for of in listed.values())] == []
