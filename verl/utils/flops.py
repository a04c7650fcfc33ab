"""The arithmetic of a training step and the peak of a device: together the model FLOPs utilisation.

MFU as in Chowdhery et al., PaLM (2022), appendix B: the operations of a step without recomputation, over the devices'
peak in its time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PEAK_BFLOAT16 = {
    "H100 PCIe": 756e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "H20": 148e12,
}
"""FLOP/s by a part of the device's name, without sparsity, from NVIDIA's data sheets. The first match counts."""
COUNTED = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Architectures (`model_type`) with known matrices: attention with grouped queries, gated MLPs, experts."""
MATRIX = {"cpu": 512}
"""Rows of the square matrices whose product is timed; 8192 on accelerators."""
TRIALS = 3


def is_counted(model: PretrainedConfig) -> bool:
    """Whether `training_flops` knows the architecture."""
    return model.model_type in COUNTED


def training_flops(model: PretrainedConfig, lengths: Iterable[int]) -> float:
    """FLOPs of the forward and backward pass over sequences of `lengths` tokens: 6 per token and parameter of a matrix
    that multiplies the token, 12 per layer, head, element of a head and pair of tokens."""
    text: Any = model.get_text_config()
    heads, head_size = text.num_attention_heads, _head_size(text)
    total = 0.0
    for length in lengths:
        total += 6.0 * length * _parameters_per_token(text)
        total += 12.0 * text.num_hidden_layers * heads * head_size * length**2
    return total


def peak_flops(device: torch.device) -> float:
    """Peak FLOP/s of `device`: from its data sheet if known, else measured now with a product of two matrices.

    On a CPU measured with all of torch's threads, for the faster of bfloat16 and float32.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, flops in PEAK_BFLOAT16.items():
            if part in name:
                return flops
    return max(_matmul_flops(device, dtype) for dtype in (torch.bfloat16, torch.float32))


def _head_size(text: Any) -> int:
    size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return size


def _parameters_per_token(text: Any) -> float:
    hidden, head_size = text.hidden_size, _head_size(text)
    attention = 2 * hidden * head_size * (text.num_attention_heads + text.num_key_value_heads)
    mlps = sum(_mlp_parameters(text, layer) for layer in range(text.num_hidden_layers))
    return float(text.num_hidden_layers * attention + mlps + hidden * text.vocab_size)


def _mlp_parameters(text: Any, layer: int) -> int:
    """Those that one token meets: of the experts, only the ones that it is sent to."""
    hidden, experts = text.hidden_size, getattr(text, "num_experts", 0) or 0
    every = getattr(text, "decoder_sparse_step", 1)
    if not experts or layer in (getattr(text, "mlp_only_layers", None) or ()) or (layer + 1) % every:
        return int(3 * hidden * text.intermediate_size)
    shared = getattr(text, "shared_expert_intermediate_size", 0) or 0
    active = text.num_experts_per_tok * text.moe_intermediate_size + shared
    return int(3 * hidden * active + hidden * experts + (hidden if shared else 0))


def _matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Of the fastest of a few trials."""
    rows = MATRIX.get(device.type, 8192)
    matrix = torch.ones(rows, rows, dtype=dtype, device=device)
    seconds = []
    for _ in range(TRIALS):
        start_s = time.perf_counter()
        product = matrix @ matrix
        product[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start_s)
    return 2.0 * rows**3 / min(seconds)
