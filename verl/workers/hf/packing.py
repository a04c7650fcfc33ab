"""Sequences one after the other in one row, without padding: which models keep them apart, and how."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl.compat.transformers import attention, remembers_tokens, takes_other_attention

logger = logging.getLogger(__name__)

BY_SEQUENCE = "verl_by_sequence"
LENGTHS = "sequence_lengths"
"""What models are called with beside the packed row, and hand on to their attention: a list of ints."""
PROBE = (16, 4)
"""Lengths of the two sequences of a probe: the second sees mostly the first one, if it sees it."""
LEAK = 0.05
"""In standard deviations of the last hidden states. What another grouping of tokens rounds differently is far below,
what another context changes is far above."""


def attend_by_sequence(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
    """torch's fused attention for each sequence of a packed row by itself: it costs what the sequences cost.

    The mask of the whole row says what is seen inside of a sequence (windows, chunks); its blocks are used.
    """
    lengths = options.pop(LENGTHS, None)
    if not lengths or len(lengths) == 1 or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    outputs, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        mask = None if attention_mask is None else attention_mask[:, :, part, part]
        output, _ = sdpa_attention_forward(
            module, query[:, :, part], key[:, :, part], value[:, :, part], mask, **options
        )
        outputs.append(output)
        start += length
    return torch.cat(outputs, dim=1), None


ALL_ATTENTION_FUNCTIONS.register(BY_SEQUENCE, attend_by_sequence)
ALL_MASK_ATTENTION_FUNCTIONS.register(BY_SEQUENCE, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def attend_sequences_apart(model: PreTrainedModel) -> None:
    """Replace torch's fused attention, where `model` uses that, by the same for each sequence."""
    if attention(model) == "sdpa" and takes_other_attention(model):
        model.set_attn_implementation(BY_SEQUENCE)


@torch.no_grad()
def keeps_sequences_apart(model: nn.Module, device: torch.device) -> bool:
    """Whether a sequence in a row comes out the same, whatever is in front of it in that row.

    A collective: the model is called twice. It asks the model because no attribute of one tells: states, convolutions,
    and masks that are made without looking at positions mix sequences.
    """
    transformer: Any = model
    if remembers_tokens(model):
        return False
    first, second = PROBE
    most = min(transformer.config.get_text_config().vocab_size, 1000)
    ids = torch.randint(1, most, (2, first + second), generator=torch.Generator().manual_seed(0))
    ids[1, first:] = ids[0, first:]
    positions = torch.cat([torch.arange(length) for length in PROBE])[None].to(device)
    lengths = {LENGTHS: list(PROBE)} if takes_lengths(model) else {}
    states: list[torch.Tensor] = []
    head = transformer.get_output_embeddings() or transformer.score
    handle = head.register_forward_pre_hook(lambda module, args: states.append(args[0][0, first:]))
    try:
        for row in ids:
            model(input_ids=row[None].to(device), position_ids=positions, use_cache=False, **lengths)
    finally:
        handle.remove()
    one, other = (values.float() for values in states)
    leak = ((one - other).abs().max() / one.std()).reshape(1)
    dist.all_reduce(leak, op=dist.ReduceOp.MAX)
    return bool(leak < LEAK)


def takes_lengths(model: nn.Module) -> bool:
    """Whether `attend_sequences_apart` has changed it."""
    return attention(model) == BY_SEQUENCE
