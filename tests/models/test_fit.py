"""Of every architecture: whole weights fit its configuration, and weights that lack any kind of tensor do not."""

from __future__ import annotations

import re

import pytest

from tests.models.architectures import ARCHITECTURES
from verl.utils.config import ConfigError
from verl.utils.model import load_hf_config
from verl.utils.model_files import weight_tensors
from verl.workers.config import HFModelConfig
from verl.workers.hf.fit import require_fit

KEY = "model.path"
TIED = re.compile(r"lm_head|embed_out|output_projection|embed_tokens|wte|word_embeddings|embedding")
"""The head or the embedding, of which a model may need one alone."""
RENAMED = {"qwen3_moe-stacked": ".experts.", "gemma3": "vision_tower."}
"""In their files such tensors have other names than transformers would give, by which is told what is missing."""


def kind(name):
    """Without the numbers of layers and experts."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


@pytest.mark.cells(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_whole_weights_fit_and_without_any_kind_of_tensor_they_do_not(name, checkpoints, monkeypatch):
    """As tools leave them out that do not know of experts, norms or biases."""
    monkeypatch.setattr("verl.workers.hf.fit.SHOWN", 1000)
    config = load_hf_config(HFModelConfig(path=str(checkpoints(name))))
    tensors = weight_tensors(checkpoints(name), KEY)
    require_fit(config, tensors, KEY, remote=False)
    kinds = sorted({kind(tensor) for tensor in tensors if not tensor.startswith("mtp.") and not TIED.search(tensor)})
    assert len(kinds) > 3
    for half in (kinds[::2], kinds[1::2]):
        left_out = [tensor for tensor in tensors if kind(tensor) in half]
        rest = {tensor: each for tensor, each in tensors.items() if tensor not in left_out}
        with pytest.raises(ConfigError, match="does not fit the weights") as refusal:
            require_fit(config, rest, KEY, remote=False)
        unnamed = [tensor for tensor in left_out if f"{tensor} is not there" not in str(refusal.value)]
        assert [tensor for tensor in unnamed if RENAMED.get(name, "\0") not in tensor] == []
