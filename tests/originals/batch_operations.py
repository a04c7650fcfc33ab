"""What operations on batches give: {batches, cases} comes in as JSON, a list of {value} or {error} goes out.

A batch is {tensors, objects, meta}; a case is a list of steps (name, batch, arguments), each on what the one before has
given. Run as a file with PyPI's verl or this project in front.
"""

import json
import sys
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto


def made(described: dict[str, Any]) -> DataProto:
    tensors = {key: torch.tensor(value) for key, value in described["tensors"].items()}
    objects = {key: np.array([*value, None], dtype=object)[:-1] for key, value in described["objects"].items()}
    return DataProto.from_dict(tensors, objects, json.loads(json.dumps(described["meta"])))


def shown(value: Any) -> Any:
    """As JSON: batches by what they hold, in the order of the keys' names."""
    if isinstance(value, DataProto):
        tensors = {} if value.batch is None else {key: value.batch[key] for key in sorted(value.batch.keys())}
        return {
            "length": len(value),
            "tensors": shown(tensors),
            "objects": shown(dict(sorted(value.non_tensor_batch.items()))),
            "meta": shown(dict(sorted(value.meta_info.items()))),
        }
    if isinstance(value, dict):
        return {key: shown(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shown(each) for each in value]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def index(kind: str, rows: list[Any]) -> Any:
    kinds = {
        "list": list,
        "array": np.array,
        "tensor": torch.tensor,
        "int32": lambda given: np.array(given, dtype=np.int32),
        "int32 tensor": lambda given: torch.tensor(given, dtype=torch.int32),
    }
    return kinds[kind](rows)


def reordered(value: DataProto, *order: Any) -> DataProto:
    value.reorder(index(*order))
    return value


OPERATIONS: dict[str, Any] = {
    "select_idxs": lambda value, *rows: value.select_idxs(index(*rows)),
    "reorder": reordered,
    "slice": lambda value, *part: value[slice(*part)],
    "get": lambda value, *rows: value[index(*rows)],
    "part": lambda value, name, size, number: getattr(value, name)(size)[number],
    "concat itself": lambda value: DataProto.concat([value, value]),
    "padded": lambda value, size: pad_dataproto_to_divisor(value, size)[0],
    "without": lambda value, key: (value.pop([key]), value)[1],
    "item": lambda value, row: value[row].non_tensor_batch,
    "pad": pad_dataproto_to_divisor,
    "unpad": unpad_dataproto,
    "pad_and_unpad": lambda value, size: unpad_dataproto(*pad_dataproto_to_divisor(value, size)),
    "pop": lambda value, keys: (value.pop(**keys), value),
    "select": lambda value, keys: value.select(**keys),
    "to_tensordict": lambda value: DataProto.from_tensordict(value.to_tensordict()),
    "sample_level_repeat": lambda value, *times: value.sample_level_repeat(index(*times)),
    "iterate": lambda value, *sizes: list(value.make_iterator(*sizes)),
}


def done(value: Any, name: str, arguments: list[Any], batches: list[DataProto]) -> Any:
    if name == "concat":
        return DataProto.concat([value, *(batches[row] for row in arguments)])
    if name == "union":
        return value.union(batches[arguments[0]])
    if name in OPERATIONS:
        return OPERATIONS[name](value, *arguments)
    found = getattr(value, name)(*arguments)
    return value if found is None else found


def found(case: list[list[Any]], given: dict[str, Any]) -> dict[str, Any]:
    batches = [made(each) for each in given["batches"]]
    value: Any = batches[case[0][1]]
    try:
        for name, _, *arguments in case:
            value = done(value, name, arguments, batches)
        return {"value": shown(value)}
    except Exception as exc:  # noqa: BLE001 - that it raises is a result, too
        return {"error": type(exc).__name__}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    sys.stdout.write("\n" + json.dumps([found(case, given) for case in given["cases"]]))
