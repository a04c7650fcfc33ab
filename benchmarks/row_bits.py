"""Which operators give a row the same bits whatever is beside it, on this processor: the table of docs/lab/exact.md.

python -m benchmarks.row_bits
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, Qwen2RotaryEmbedding

from verl.workers.hf.exact import cancelling

ROWS = 1024
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 343, 512, 1000, 1023)
Operator = Callable[[torch.Tensor], torch.Tensor]


def rope(rows: torch.Tensor) -> torch.Tensor:
    """Rows are positions."""
    table = Qwen2RotaryEmbedding(Qwen2Config(hidden_size=512, num_attention_heads=4))
    return torch.cat(table(torch.zeros(1), rows[None, :, 0].long()), dim=-1)[0]


def operators() -> dict[str, tuple[Operator, torch.Tensor]]:
    """By name, with the rows that they are given."""
    torch.manual_seed(0)
    found: dict[str, tuple[Operator, torch.Tensor]] = {}
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in ((64, 4), (64, 32), (64, 192), (896, 896), (896, 4864), (4864, 896), (11008, 256)):
        weight, rows = cancelling((outputs, inputs), ROWS, generator)
        found[f"linear {inputs} to {outputs}"] = partial(functional.linear, weight=weight), rows
    weight = torch.randn(192, 64) / 8
    found["linear 64 to 192 in float32"] = partial(functional.linear, weight=weight), torch.randn(ROWS, 64)
    norm = Qwen2RMSNorm(896).bfloat16()
    wide, odd = torch.randn(ROWS, 896).bfloat16(), 3 * torch.randn(ROWS, 172).bfloat16()
    found["RMSNorm"] = norm, wide
    found["silu"] = functional.silu, odd
    found["gelu (tanh)"] = lambda rows: functional.gelu(rows, approximate="tanh"), odd
    found["tables of RoPE"] = rope, torch.arange(ROWS).float()[:, None]
    found["log-softmax"] = lambda rows: (rows.float() / 0.7).log_softmax(-1), 4 * torch.randn(ROWS, 4001).bfloat16()
    return found


@torch.no_grad()
def differences(operator: Operator, rows: torch.Tensor) -> dict[int, float]:
    """By number of rows: the share of outputs that are not those of all rows together."""
    whole, found = operator(rows), {}
    for count in COUNTS:
        for start in {0, 1, (ROWS - count) // 3, ROWS - count}:
            few = operator(rows[start : start + count])
            if not torch.equal(few, whole[start : start + count]):
                found[count] = (few != whole[start : start + count]).float().mean().item()
    return found


def main() -> None:
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name, (operator, rows) in operators().items():
            different = ", ".join(f"{count}: {share:.2%}" for count, share in differences(operator, rows).items())
            sys.stdout.write(f"| {name}, {threads} threads | {different or 'same'} |\n")


if __name__ == "__main__":
    main()
