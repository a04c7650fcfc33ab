from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from verl.utils.config import ConfigError
from verl.workers.hf.checkpoint import HFCheckpoint
from verl.workers.hf.precision import names_kept_wide, require_precision


@pytest.fixture
def checkpoint(tmp_path):
    tensors = {
        "embed.weight": torch.ones(64, 8, dtype=torch.bfloat16),
        "norm.weight": torch.ones(8, dtype=torch.bfloat16),
        "q_proj.bias": torch.ones(8, dtype=torch.bfloat16),
        "gate.e_score_correction_bias": torch.ones(4, dtype=torch.bfloat16),
        "mixer.A_log": torch.ones(4, dtype=torch.bfloat16),
        "mixer.D": torch.ones(4, 1, dtype=torch.bfloat16),
        "router.weight": torch.ones(4, 8, dtype=torch.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with HFCheckpoint(tmp_path) as opened:
        yield opened


def test_tensors_that_the_file_or_an_engine_keeps_wide_travel_as_trained(checkpoint):
    assert names_kept_wide(checkpoint.shapes, checkpoint) == {
        "gate.e_score_correction_bias",
        "mixer.A_log",
        "mixer.D",
        "router.weight",
    }


def test_training_in_a_dtype_that_rounds_what_the_file_keeps_wide_is_refused(checkpoint):
    require_precision(checkpoint.names, checkpoint, torch.float32)
    with pytest.raises(ConfigError, match=r"round 1 tensors .* among bfloat16 ones: router.weight; set .*=fp32"):
        require_precision(checkpoint.names, checkpoint, torch.bfloat16)
