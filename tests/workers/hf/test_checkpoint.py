"""What is read of a model's files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from verl.checkpoint_engine.plan.types import Box
from verl.utils.config import ConfigError
from verl.workers.hf.checkpoint import HFCheckpoint


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_weights_that_are_not_finite_are_named_where_they_are_read(value: float, dtype: torch.dtype, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    bad = torch.ones(4, 3)
    bad[2, 1] = value
    tensors = {
        "good": torch.ones(2).to(dtype),
        "bad": bad.to(dtype),
        "none": torch.ones(0),
        "count": torch.ones(1).int(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with HFCheckpoint(tmp_path) as checkpoint:
        for name in ("good", "none", "count"):
            assert checkpoint.read(name).tolist() == tensors[name].tolist()
        assert checkpoint.read("bad", Box((0, 0), (2, 3))).shape == (2, 3)
        with pytest.raises(ConfigError, match=r"bad in .*model\.safetensors has (NaN|values of .*inf)"):
            checkpoint.read("bad")
