"""What a publisher reads of a module or of named tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import parametrizations, prune, spectral_norm
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

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


class Holder(nn.Module):
    """Whatever is put into it."""

    def __init__(self, **inside: Any) -> None:
        super().__init__()
        for name, one in inside.items():
            setattr(self, name, one)


def with_attribute(name: str, value: object) -> nn.Module:
    layer = nn.Linear(2, 2)
    setattr(layer.weight, name, value)
    return layer


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def pruned(layer: nn.Module) -> nn.Module:
    prune.random_unstructured(layer, "weight", 0.5)
    return layer


def with_plain_weight(layer: nn.Module) -> nn.Module:
    values = layer.weight.detach()
    del layer.weight
    layer.weight = values
    return layer


class WithValueHead(nn.Module):
    """As TRL's: a checkpoint has the names of the model inside."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_model, self.v_head = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 1)

    def state_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        heads = self.v_head.state_dict(*arguments, **named)
        return self.pretrained_model.state_dict(**named) | {f"v_head.{name}": one for name, one in heads.items()}


def with_hook(change: Any) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_state_dict_post_hook(lambda module, state, prefix, _: change(state, prefix))
    return nn.Sequential(layer)


def quantized() -> nn.Module:
    """As bitsandbytes' `Linear8bitLt`, whose state dict has the scales, too."""
    layer = with_hook(lambda state, prefix: state.update({f"{prefix}SCB": torch.ones(2)}))
    layer[0].weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    layer[0].weight.SCB = torch.ones(2)
    return layer


def renamed(state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}fused"] = state.pop(f"{prefix}weight")


def dequantized(state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2


def more(state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}_extra_state"] = torch.ones(1)


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


def test_what_a_checkpoint_has_beside_weights_is_not_sent():
    assert sent(ModelSource(with_hook(more))).keys() == {"0.weight", "0.bias"}


def test_wrappers_do_not_change_names():
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(model)
    assert sent(ModelSource(compiled)).keys() == {"0.weight", "0.bias"}


def test_floating_point_tensors_are_sent_in_the_dtype_that_is_asked_for():
    for dtype in ("bfloat16", torch.bfloat16):
        found = sent(ModelSource(Tied(), dtype))
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
        ({"w": TwoTensor(torch.ones(3), torch.ones(3))}, "w, a TwoTensor, has no memory of its own"),
        ({"w": freed()}, "w, a Tensor, has no memory of its own"),
        ([("w", torch.ones(3))], "a torch module or a mapping of named tensors, not list"),
        (nn.Linear(2, 2).named_parameters(), "a mapping of named tensors, not generator"),
        (nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2))), "computed from others: 0.weight"),
        (nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2))), "computed from others: 0.weight"),
        (nn.Sequential(spectral_norm(nn.Linear(2, 2))), "computed from others: 0.weight"),
        (nn.Sequential(pruned(nn.Linear(2, 2))), r"computed from others: 0.weight. .*prune.remove"),
        (nn.Sequential(with_plain_weight(nn.Linear(2, 2))), "no parameters, but plain tensors .*: 0.weight"),
        (with_attribute("ds_id", 0), "weight is divided among ranks by DeepSpeed's ZeRO-3"),
        (with_attribute("quant_state", "4 bits"), "weight is packed by bitsandbytes"),
        (quantized(), "0.weight is quantized by bitsandbytes: dequantize the model"),
        (WithValueHead(), "has other names or tensors than its modules: pretrained_model.0.weight"),
        (with_hook(renamed), "has other names or tensors than its modules: 0.weight"),
        (with_hook(dequantized), "has other names or tensors than its modules: 0.weight"),
        (Holder(layer=Holder(original_module=nn.Linear(2, 2))), "adapters lie beside their matrices .*: layer"),
        (
            Holder(weight=nn.Parameter(torch.ones(1)), module=nn.Linear(2, 2)),
            "two tensors are weight without the names",
        ),
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


@pytest.mark.parametrize("dtype", ["int8", "bf16", "Tensor", torch.int8, 16])
def test_a_dtype_that_is_none_is_refused(dtype: Any):
    with pytest.raises(ConfigError, match="no floating-point type"):
        ModelSource({"w": torch.ones(3)}, dtype)


def test_nothing_is_refused():
    with pytest.raises(ConfigError, match="nothing to publish"):
        ModelSource({})


def test_a_layer_that_is_used_twice_is_two_of_a_server_and_a_tied_matrix_is_one():
    layer, model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), Tied()
    model.inner = nn.Sequential(layer, nn.Linear(3, 3), layer)
    model.inner[1].weight = layer[0].weight
    found = sent(ModelSource(model))
    state = model.state_dict()
    assert found.keys() == state.keys() - {"head.weight"}
    assert all(torch.equal(found[name], state[name]) for name in found)


def test_what_a_model_of_transformers_declares_as_tied_is_sent_once():
    shared = nn.Linear(3, 3)
    model = Holder(first=Holder(block=shared), second=Holder(block=shared))
    assert sent(ModelSource(model)).keys() == {
        f"{one}.block.{of}" for one in model._modules for of in shared._parameters
    }
    model._tied_weights_keys = {r"second\.block\.\w+": r"first\.block\.\w+"}
    assert sent(ModelSource(model)).keys() == {f"first.block.{of}" for of in shared._parameters}


def test_averaged_weights_are_sent_under_the_names_of_the_model():
    model = nn.Sequential(nn.Linear(2, 2))
    averaged = AveragedModel(model)
    with torch.no_grad():
        model[0].weight.add_(1)
    averaged.update_parameters(model)
    found = sent(ModelSource(averaged))
    assert found.keys() == {"0.weight", "0.bias"}
    assert torch.equal(found["0.weight"], averaged.module[0].weight)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_that_are_trained_while_they_are_read_are_refused(dtype: str | None):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    source = ModelSource(model, dtype)
    first, *_, last = source.shards()
    kind = getattr(torch, dtype or "float32")
    source.copy(first, torch.empty(first.box.shape, dtype=kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1)
    with pytest.raises(ConfigError, match=r"1.bias was written into while the weights were copied"):
        source.copy(last, torch.empty(last.box.shape, dtype=kind))
    source.refresh()
    assert torch.equal(sent(source)["1.bias"], model[1].bias.detach().to(kind))


@torch.inference_mode()
def test_tensors_made_for_inference_are_sent():
    assert sent(ModelSource({"w": torch.arange(3.0)}))["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).T,
        torch.arange(3.0).expand(2, 3),
        torch.arange(8.0).as_strided((3, 4), (2, 1)),
        torch.arange(12.0)[::3],
        torch.arange(4, dtype=torch.float64),
        torch.arange(4.0).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.tensor(7.0),
        torch.arange(4.0, requires_grad=True) * 2,
        nn.Parameter(torch.arange(4.0)),
    ],
    ids=lambda tensor: f"{str(tensor.dtype)[6:]} {list(tensor.shape)} {list(tensor.stride())}",
)
def test_views_and_dtypes_of_all_kinds_are_sent_bit_by_bit(tensor: torch.Tensor):
    source, expected = ModelSource({"w": tensor}), tensor.detach().contiguous().flatten().view(torch.uint8)
    for shard in source.shards():
        view = source.view(shard)
        assert view is None or torch.equal(view.flatten().view(torch.uint8), expected)
        assert torch.equal(sent(source)["w"].flatten().view(torch.uint8), expected)


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Of a process group in which nobody hears anything."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


FSDP_OVER_TP = (_StridedShard(0, split_factor=2), Sharded(0))
EXPERTS_OF_TRANSFORMERS = (Replicate(), _StridedShard(1, split_factor=2))
"""`gate_up_proj` of all experts: each rank has a part of the gates and the same part of what they gate."""


@pytest.mark.parametrize("shape", [(8, 12, 2), (7, 4, 3), (2, 20, 1)])
@pytest.mark.parametrize(
    "placements",
    [
        (Replicate(), Sharded(0)),
        (Sharded(1), Replicate()),
        (Sharded(0), Sharded(1)),
        (Sharded(0), Sharded(0)),
        FSDP_OVER_TP,
        (_StridedShard(1, split_factor=2), Sharded(1)),
        EXPERTS_OF_TRANSFORMERS,
        (Sharded(0), _StridedShard(1, split_factor=4)),
    ],
    ids=str,
)
def test_ranks_of_a_mesh_have_the_whole_tensor_between_them(placements: Sequence[Placement], shape: tuple[int, ...]):
    whole = torch.arange(float(np.prod(shape))).view(shape)
    found = torch.full(shape, torch.nan)
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            source = ModelSource({"w": distribute_tensor(whole, mesh, placements, src_data_rank=None)})
            for shard in source.shards():
                inside = tuple(map(slice, shard.box.start, shard.box.stop))
                part = torch.empty(shard.box.shape)
                source.copy(shard, part)
                view = source.view(shard)
                assert torch.equal(part, whole[inside])
                assert view is None or torch.equal(view, part)
                found[inside] = part
            assert source.may_be_equal("w", "w")
    assert torch.equal(found, whole)


def test_what_is_to_be_summed_over_ranks_and_what_is_no_shard_of_its_shape_are_refused_by_name():
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        summed = DTensor.from_local(torch.ones(4, 2), mesh, [Partial()])
        with pytest.raises(ConfigError, match=r"w cannot be sent: with placements \(Partial\(sum\),\) no rank has its"):
            ModelSource({"w": summed})
        uneven = DTensor.from_local(torch.ones(1, 2), mesh, [Sharded(0)], shape=torch.Size((4, 2)), stride=(2, 1))
        with pytest.raises(ConfigError, match=r"w cannot be sent: .* a rank has \[2, 2\] of it, not \[1, 2\]"):
            ModelSource({"w": uneven})
