"""From a config alone: the tensors that a checkpoint has, and what each rank would hold of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.planning import held_process
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import make_plan
from verl.checkpoint_engine.plan.types import Box
from verl.planning import shapes
from verl.planning.job import Fabric, Hosts, Job, bytes_per_s, fraction_of, hosts_of
from verl.planning.memory import needs
from verl.planning.shapes import planned_model
from verl.utils.builtin import builtin_model
from verl.utils.config import ConfigError
from verl.workers.hf.checkpoint import HFCheckpoint

MODELS = ("builtin:tiny-qwen2", "builtin:tiny-qwen3-moe")


def job(ranks: int, **more: Any) -> Job:
    return Job(
        trainers=Hosts(count=1, each=ranks),
        rollouts=Hosts(count=1, each=2),
        rollout_tp=2,
        fabric=Fabric(host_bytes_per_s=1e9),
        **{"strategy": "fsdp2", **more},
    )


def boxes(table: ShardTable, layout: Any) -> set[tuple[str, Box]]:
    specs = [layout.specs[tensor] for tensor in table.tensor.tolist()]
    return {(spec.name, table.box(row, len(spec.shape))) for row, spec in enumerate(specs)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_names_and_shapes_are_those_of_a_checkpoint(name: str, strategy: str, tmp_path: Path):
    directory = builtin_model(name)
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    model = planned_model(tmp_path, job(2, strategy=strategy))
    with HFCheckpoint(directory) as checkpoint:
        assert {spec.name: spec.shape for spec in model.layout.specs} == checkpoint.shapes
    assert {spec.dtype for spec in model.layout.specs} == {"bfloat16"}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_ranks_hold_the_rows_that_torch_would_deal_out(name: str, ranks: int):
    directory = builtin_model(name)
    model = planned_model(directory / "config.json", job(ranks))
    made, conversion = shapes._whole(shapes._config(directory)[0])
    for rank in range(ranks):
        expected = set()
        for target, tensor in made.state_dict().items():
            if target not in conversion.pieces:
                continue  # a tied head
            chunks = torch.arange(tensor.shape[0]).chunk(ranks)
            if rank < len(chunks):
                low, high = int(chunks[rank][0]), int(chunks[rank][-1]) + 1
                held = Box((low, *(0,) * (tensor.dim() - 1)), (high, *tensor.shape[1:]))
                found = [piece.narrowed(held) for piece in conversion.pieces[target]]
                expected |= {(piece.origin, piece.origin_box) for piece in found if piece}
        assert boxes(model.held[rank], model.layout) == expected
    make_plan(model.layout, model.held, block_nbytes=2**20)  # raises unless they cover everything once


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_holds_what_a_real_one_does(name: str):
    process, pipe = forked.start(held_process.main, name, 2, 3)
    with pipe:
        assert pipe.recv() > 20
    process.join()


def test_ranks_beside_each_other_repeat_where_copies_are_smaller_than_the_trainer():
    directory = builtin_model(MODELS[0])
    model = planned_model(directory, job(4, fsdp_size=2))
    assert model.held[0] is model.held[2]
    assert sum(model.held_numel) == 2 * model.parameters


def test_megatron_ranks_cover_the_model():
    model = planned_model(builtin_model(MODELS[1]), job(4, strategy="megatron", tensor=2, expert=2, expert_tensor=1))
    plan = make_plan(model.layout, model.held, block_nbytes=2**20)
    assert sum(plan.nbytes_of(rank) for rank in range(4)) == model.layout.payload_nbytes


def test_what_does_not_fit_says_so():
    model = planned_model(builtin_model(MODELS[0]), job(2))
    plan = make_plan(model.layout, model.held, block_nbytes=2**20)
    (train, *_, generate) = needs(model, plan, job(2), device_nbytes=model.parameters * 8 - 1)
    assert (train.nbytes, train.fits) == (int(model.held_numel.max()) * 16, False)
    assert generate.fits
    (shared,) = [need for need in needs(model, plan, job(2)) if need.where.endswith("shared memory")]
    assert (shared.nbytes, shared.fits) == (2 * model.layout.nbytes, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "no-such-model"}, "transformers has no model_type='no-such-model'"),
        ({}, "has no model_type"),
        ({"model_type": "vit"}, "transformers cannot build a causal language model of vit"),
    ],
)
def test_a_config_that_cannot_be_planned_is_one_line(config: dict[str, str], message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as error:
        planned_model(tmp_path, job(2))
    assert len(str(error.value).splitlines()[0]) < 400


def test_a_config_with_quantised_weights_is_planned_without(tmp_path: Path):
    config = json.loads((builtin_model(MODELS[0]) / "config.json").read_text())
    fields = config | {"quantization_config": {"quant_method": "fp8"}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    assert "dequantised" in planned_model(path, job(2)).notes[0]


@pytest.mark.parametrize(
    ("text", "rate"), [("400gbit", 50e9), ("8x400gbit", 400e9), ("50GB", 50e9), ("2.5Gbit/s", 312.5e6)]
)
def test_rates_are_read_as_people_write_them(text: str, rate: float):
    assert bytes_per_s(text) == rate


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (bytes_per_s, "fast"),
        (bytes_per_s, "0gbit"),
        (hosts_of, "0x8"),
        (hosts_of, "8x"),
        (fraction_of, "0%"),
        (fraction_of, "200%"),
    ],
)
def test_what_is_no_rate_number_or_part_is_refused(parse: Any, text: str):
    with pytest.raises(ValueError, match="is not"):
        parse(text)
    assert fraction_of("1%") == 0.01
    assert hosts_of("64x8").ranks == 512
