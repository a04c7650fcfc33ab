"""Ranks read their parts of a checkpoint; at the end of a build they must still hold them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from verl.checkpoint_engine.errors import PlanError
from verl.checkpoint_engine.plan.types import Box
from verl.workers.engine.filling import fill, require_equal
from verl.workers.engine.tensors import HeldTensor, Part
from verl.workers.hf.checkpoint import HFCheckpoint

WIDE = torch.randn(700, 1000, generator=torch.Generator().manual_seed(0))
"""More than one block."""


@pytest.fixture
def checkpoint(tmp_path):
    twin = WIDE.clone()
    twin[-1, -1] += 1
    save_file(
        {"wide": WIDE, "same": WIDE.clone(), "twin": twin, "scale": torch.tensor(3.0)}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text("{}")
    with HFCheckpoint(tmp_path) as opened:
        yield opened


def held(values: torch.Tensor, box: Box | None = None, shape=tuple(WIDE.shape)) -> HeldTensor:
    part = Part(box=box or Box.whole(tuple(values.shape)), values=lambda: values)
    return HeldTensor(shape=shape, dtype=values.dtype, is_parameter=True, parts=(part,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("box", [Box((0, 0), (700, 1000)), Box((3, 2), (690, 999)), Box((5, 5), (6, 6))])
def test_a_part_gets_the_bytes_of_the_file_cast_to_its_dtype(checkpoint, box, dtype):
    values = torch.empty(box.shape, dtype=dtype)
    filled = fill({"wide": held(values, box)}, checkpoint)
    rows = slice(box.start[0], box.stop[0]), slice(box.start[1], box.stop[1])
    assert torch.equal(values, WIDE[rows].to(dtype))
    filled.require("Model")


def test_one_changed_element_is_found_and_its_tensor_named(checkpoint):
    tensors = {"wide": held(torch.empty(700, 1000)), "scale": held(torch.empty(()), shape=())}
    filled = fill(tensors, checkpoint)
    tensors["wide"].parts[0].values()[-1, 17] *= 1 + 2**-20
    with pytest.raises(PlanError, match=r"after Model was built, 1 tensors do not hold .*: wide; .*check_load=false"):
        filled.require("Model")


def test_a_new_tensor_is_zero_and_not_compared(checkpoint):
    values = torch.ones(4)
    fill({"new": held(values, shape=(4,))}, checkpoint, zero={"new"}).require("Model")
    assert values.tolist() == [0, 0, 0, 0]


def test_two_values_of_a_tied_tensor_are_refused(checkpoint):
    require_equal("wide", "same", held(WIDE), checkpoint)
    with pytest.raises(PlanError, match="ties twin to wide.*tie_word_embeddings to false"):
        require_equal("wide", "twin", held(WIDE), checkpoint)
