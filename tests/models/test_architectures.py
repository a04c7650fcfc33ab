"""The random checkpoints themselves: transformers loads every tensor of each, and computes something with it."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models.architectures import ARCHITECTURES, FILE, build_random, persistent_buffers, write_checkpoint
from tests.models.cases import NUM_PROMPT, NUM_RESPONSE, reference
from verl.utils.config import ConfigError
from verl.utils.trainable import require_trainable

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")
SEEN_AT_ONCE = ("window", "chunk", "block_size", "index_topk")
"""Parts of names in configurations: of numbers of tokens that a layer looks at or computes at once."""
SPEAKING = {"musicgen", "musicgen_melody"}
"""They have no configuration by default, and an encoder with a decoder in any."""
REFUSED_BY_PROBE = ("cpmant", "gemma4_assistant", "gemma4_unified_assistant")
"""transformers lists them as causal language models. One looks at later tokens, the others need states of another."""
SEES_NO_LESS = ("max_window_layers", "max_inference_chunksize")
"""Neither is such a number. xLSTM computes longer sequences than the second without gradients, but in training."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_loads_what_was_written_and_computes_with_it(checkpoints, name):
    model, info = reference(checkpoints(name))
    assert info == {}
    written = build_random(ARCHITECTURES[name], 0).state_dict()
    assert written.keys() == model.state_dict().keys()
    assert [key for key, value in model.state_dict().items() if not torch.equal(value, written[key])] == []

    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    assert logits.isfinite().all()
    assert 0.2 < logits.std(1).mean() < 5  # what stands in front matters, and no token gets it all


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_a_model_sees_at_once_is_shorter_than_the_tested_sequences(name):
    config = vars(ARCHITECTURES[name].make_config().get_text_config())
    sizes = {
        key: value
        for key, value in config.items()
        if type(value) is int and key not in SEES_NO_LESS and any(part in key for part in SEEN_AT_ONCE)
    }
    if set(config.get("layer_types") or ()) == {"full_attention"}:
        sizes.pop("sliding_window", None)
    assert {key: value for key, value in sizes.items() if value >= NUM_PROMPT + NUM_RESPONSE} == {}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_tensor_of_a_checkpoint_has_only_one_value(name):
    model = build_random(ARCHITECTURES[name], 0)
    tensors = dict((*model.named_parameters(), *persistent_buffers(model)))
    floats = {key: tensor for key, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel() > 1}
    assert [key for key, tensor in floats.items() if (tensor == tensor.flatten()[0]).all()] == []
    assert [key for key, tensor in tensors.items() if (tensor == 0).any()] == []


def test_a_checkpoint_in_bfloat16_keeps_in_float32_what_transformers_keeps(tmp_path):
    write_checkpoint(ARCHITECTURES["deepseek_v3"], tmp_path, dtype=torch.bfloat16)
    with safe_open(tmp_path / FILE, framework="pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert {name for name, dtype in dtypes.items() if dtype == "F32"} == {
        "model.layers.1.mlp.gate.e_score_correction_bias"
    }
    assert set(dtypes.values()) == {"F32", "BF16"}


def test_the_same_seed_gives_the_same_file_and_another_seed_another(tmp_path):
    for directory, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_checkpoint(ARCHITECTURES["qwen3_moe"], tmp_path / directory, seed=seed)
    a, b, c = ((tmp_path / directory / FILE).read_bytes() for directory in "abc")
    assert a == b
    assert a != c


def test_the_tokenizer_of_a_checkpoint_covers_its_vocabulary(checkpoints):
    directory = checkpoints("llama")
    assert len(AutoTokenizer.from_pretrained(directory)) == ARCHITECTURES["llama"].config["vocab_size"]


def test_the_matrix_has_every_kind_of_model_in_number():
    assert len({architecture.model_type for architecture in ARCHITECTURES.values()}) >= 50


def test_every_causal_language_model_of_transformers_is_in_the_matrix_or_refused():
    def is_refused(model_type: str) -> bool:
        try:
            require_trainable(CONFIG_MAPPING[model_type](), "model.path")
        except ConfigError:
            return True
        return False

    tried = {type(architecture.make_config()).__name__ for architecture in ARCHITECTURES.values()}
    others = {
        kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if CONFIG_MAPPING[kind].__name__ not in tried
    } - SPEAKING
    assert {kind for kind in others if not is_refused(kind)} == set(REFUSED_BY_PROBE)
