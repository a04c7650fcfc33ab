"""What a publisher reads of a module or of named tensors."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from verl.checkpoint_engine.errors import ConfigError
from verl.checkpoint_engine.plan.types import Box, Shard
from verl.checkpoint_engine.publisher.model_source import ModelSource


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("computed", torch.ones(2), persistent=False)


def sent(source: ModelSource) -> dict[str, torch.Tensor]:
    found = {}
    specs = {spec.name: spec for spec in source.specs()}
    for shard in source.shards():
        found[shard.name] = torch.empty(shard.box.shape, dtype=getattr(torch, specs[shard.name].dtype))
        source.copy(shard, found[shard.name])
    return found


def test_a_module_is_its_parameters_and_persistent_buffers_tied_ones_once():
    model = Tied()
    found = sent(ModelSource(model))
    state = model.state_dict()
    assert found.keys() == state.keys() - {"head.weight"}
    assert all(torch.equal(found[name], state[name]) for name in found)


def test_wrappers_do_not_change_names():
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(model)
    assert sent(ModelSource(compiled)).keys() == {"0.weight", "0.bias"}


def test_floating_point_tensors_are_sent_in_the_dtype_that_is_asked_for():
    found = sent(ModelSource(Tied(), "bfloat16"))
    assert found["inner.0.weight"].dtype == torch.bfloat16
    assert found["inner.1.num_batches_tracked"].dtype == torch.int64


def test_parts_are_read_where_they_are():
    source = ModelSource({"w": torch.arange(24.0).view(6, 4)})
    part = torch.empty(2, 3)
    source.copy(Shard("w", Box((2, 1), (4, 4))), part)
    assert part.tolist() == [[9, 10, 11], [13, 14, 15]]
    rows = source.view(Shard("w", Box((2, 0), (4, 4))))
    assert rows is not None
    assert rows.is_contiguous()
    assert source.view(Shard("w", Box((2, 1), (4, 4)))) is None


def test_a_mapping_may_have_other_tensors_under_its_names_later():
    tensors = {"w": torch.zeros(3)}
    source = ModelSource(tensors)
    tensors["w"] = torch.ones(4, dtype=torch.float64)
    tensors["another"] = torch.ones(1)
    source.refresh()
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in sent(source).items()} == {
        "w": (torch.float64, [1, 1, 1, 1]),
        "another": (torch.float32, [1]),
    }
    tensors.clear()
    with pytest.raises(ConfigError, match="nothing to publish"):
        source.refresh()


def test_tensors_without_values_are_refused_by_name():
    with pytest.raises(ConfigError, match="no values: .*w"):
        ModelSource({"w": torch.empty(3, device="meta")})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"w": np.ones(3)}, "'w': ndarray"),
        ({"w": None}, "'w': NoneType"),
        ({"w": {"inner": torch.ones(3)}}, "'w': dict"),
        ({1: torch.ones(3)}, "1: Tensor"),
        ({"": torch.ones(3)}, "'': Tensor"),
        ({"w": torch.eye(3).to_sparse()}, "w is of the layout torch.sparse_coo, .*to_dense"),
        ({"w": torch.eye(3).to_mkldnn()}, "w is of the layout torch._mkldnn"),
        ({"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)}, "w is nested"),
        ({"w": torch.ones(3, dtype=torch.complex64)}, "w is complex64, which is not sent. These are: .*bfloat16"),
        ({"w": torch.ones(3, dtype=torch.uint16)}, "w is uint16, which is not sent"),
        (nn.Sequential(nn.LazyLinear(3)), "0.weight has no values yet: call the model once"),
    ],
)
def test_what_is_no_tensor_with_values_in_order_is_refused_by_name(found: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        ModelSource(found)


def test_a_view_that_negates_is_sent_as_it_reads():
    negated = torch._neg_view(torch.arange(4.0))
    source = ModelSource({"w": negated})
    (shard,) = source.shards()
    assert sent(source)["w"].tolist() == [0, -1, -2, -3]
    view = source.view(shard)
    assert view is None or view.numpy().tolist() == [0, -1, -2, -3]


def test_adapters_beside_their_matrices_are_refused_until_they_are_merged():
    model = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), second=nn.Linear(4, 4)))
    source = ModelSource(model)
    adapted = get_peft_model(model, LoraConfig(target_modules=["first"], init_lora_weights=False))
    for one in (source.refresh, lambda: ModelSource(adapted)):
        with pytest.raises(ConfigError, match=r"adapters lie beside .*first. Push what merge_and_unload\(\) returns"):
            one()
    merged = adapted.merge_and_unload()
    assert sent(ModelSource(merged)).keys() == {"first.weight", "first.bias", "second.weight", "second.bias"}
    assert torch.equal(sent(ModelSource(merged))["first.weight"], merged.first.weight)


@pytest.mark.parametrize("dtype", ["int8", "bf16", "Tensor"])
def test_a_dtype_that_is_none_is_refused(dtype: str):
    with pytest.raises(ConfigError, match="no floating-point type"):
        ModelSource({"w": torch.ones(3)}, dtype)


def test_nothing_is_refused():
    with pytest.raises(ConfigError, match="nothing to publish"):
        ModelSource({})
