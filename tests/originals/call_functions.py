"""What small functions that recipes import return, for arguments drawn by a seed: the seed comes in, results go out."""

import json
import sys
from random import Random

import torch
from omegaconf import OmegaConf
from verl.utils.metric.utils import reduce_metrics as same

from verl.utils import fs, py_functional, seqlen_balancing
from verl.utils import torch_functional as functional
from verl.utils.metric import reduce_metrics
from verl.utils.model import compute_position_id_with_mask


def tried(function, *arguments, **named):
    """Also the first argument, where the function changes that."""
    try:
        found = function(*arguments, **named)
    except Exception as exc:  # noqa: BLE001 - an answer like another
        return type(exc).__name__
    return plain(arguments[0] if found is None else found)


def plain(found):
    if isinstance(found, torch.Tensor):
        return [str(found.dtype), found.tolist()]
    if isinstance(found, dict):
        return {name: plain(value) for name, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [plain(value) for value in found]
    return found.item() if hasattr(found, "item") else found


def drawn(draw):
    """Results by function."""
    rows, columns, length = draw.randint(1, 4), draw.randint(1, 7), draw.randint(1, 9)
    ids = torch.tensor([[draw.randint(0, 5) for _ in range(columns)] for _ in range(rows)])
    mask = torch.tensor([[draw.randint(0, 1) for _ in range(columns)] for _ in range(rows)])
    values = torch.tensor([[draw.uniform(-2, 2) for _ in range(columns)] for _ in range(rows)], dtype=torch.float64)
    weights = torch.tensor([[draw.choice((0.0, 0.25, 1.5)) for _ in range(columns)] for _ in range(rows)])
    left, cut = draw.random() < 0.5, draw.choice(("error", "left", "right", "middle", "end"))
    ends = draw.choice((1, [1, 2], (3,)))
    ragged = [[draw.randint(0, 9) for _ in range(draw.randint(0, 4))] for _ in range(rows)]
    keys = draw.sample(("loss", "x/max", "min_of", "maximal_min", "a"), 3)
    numbers = {key: [draw.uniform(-1, 1) for _ in range(draw.randint(0, 3))] for key in keys}
    order = draw.sample(range(columns), columns)
    one, other = ({key: draw.randint(0, 1) for key in draw.sample("abc", 2)} for _ in range(2))
    composed = OmegaConf.create({"a": [1, None], "c": one, "d": "${c}"})
    axis = draw.choice((None, -1, 0, (0, 1)))
    called = [
        (functional.postprocess_data, (ids, mask, length, 9, left, cut)),
        (functional.pad_sequence_to_length, (ids, length, 9, left)),
        (functional.pad_2d_list_to_length, (ragged, 7, draw.choice((None, length)))),
        (functional.get_response_mask, (ids, ends, draw.choice((torch.int64, torch.float32, torch.bool)))),
        (functional.gather_from_labels, (values, ids[:, 0].clamp(max=columns - 1))),
        (functional.clip_by_value, (values, values.mean() - 0.3, values[0] + 0.1)),
        (functional.masked_sum, (values, draw.choice((mask, weights)), axis)),
        (functional.masked_mean, (values, draw.choice((mask, weights)), axis)),
        (compute_position_id_with_mask, (mask,)),
        (reduce_metrics, (dict(numbers),)),
        (same, (dict(numbers),)),
        (py_functional.append_to_dict, ({"a": [0]}, {**one, "b": [1, 2]}, draw.choice(("", "x/")))),
        (py_functional.union_two_dict, (dict(one), other)),
        (py_functional.rename_dict, ({"x/a": 1, **one}, draw.choice(("", "x/")))),
        (py_functional.list_of_dict_to_dict_of_list, ([one, other][: draw.randint(0, 2)],)),
        (py_functional.convert_to_regular_types, (draw.choice((composed, [composed, (1, 2)], (1,))),)),
        (seqlen_balancing.get_reverse_idx, (order,)),
        (seqlen_balancing.ceildiv, (draw.randint(-9, 9), length)),
        (seqlen_balancing.roundup_divisible, (draw.randint(-9, 9), length)),
        (fs.is_non_local, (draw.choice(("hdfs://a/b", "s3://a", "/a", "hdfs")),)),
    ]
    called += [(functional.masked_var, (values, each, draw.random() < 0.5)) for each in (mask, weights)]
    called.append((functional.masked_var, (values, mask * 0.01, True)))
    return {f"{number} {function.__name__}": tried(function, *said) for number, (function, said) in enumerate(called)}


if __name__ == "__main__":
    seed = json.load(sys.stdin)
    sys.stdout.write("\n" + json.dumps([drawn(Random(f"{seed} {number}")) for number in range(150)]))
