"""Pack sequences into one row without padding, for models that keep them apart.

Ranks may share the row; each then calls the model with some of its tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import MODEL_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl.compat.transformers import attention, remembers_tokens, takes_other_attention
from verl.utils.language_model import sees
from verl.utils.model import EXACT
from verl.workers.hf import exact
from verl.workers.hf.sharers import Sharers

logger = logging.getLogger(__name__)

BY_SEQUENCE = "verl_by_sequence"
SHARED = "verl_shared"
LENGTHS = "sequence_lengths"
"""The keyword with the sequences' lengths, a list of ints, which models pass on to their attention."""
SHARERS = "sequence_sharers"
"""The keyword with the ranks that share the row."""
PROBE = (16, 4)
"""Lengths of the two sequences of a probe: the second sees mostly the first one, if it sees it."""
LEAK = 0.05
"""In standard deviations of the last hidden states: far above the rounding of another grouping of tokens, far below the
effect of another context."""


def attend_by_sequence(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
    """torch's fused attention for each sequence of a packed row by itself: it costs what the sequences cost.

    The mask of the whole row says what is seen inside of a sequence (windows, chunks); its blocks are used.
    """
    lengths = options.pop(LENGTHS, None)
    if not lengths or len(lengths) == 1 or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    masks: list[Any] = [None] * len(lengths)
    if attention_mask is not None:
        masks = [attention_mask[:, :, part, part] for part in _parts(lengths)]
    return _attended(module, query, key, value, lengths, masks, options), None


def _attended(
    module: Any, query: Any, key: Any, value: Any, lengths: Sequence[int], masks: Sequence[Any], options: dict[str, Any]
) -> torch.Tensor:
    """[1, tokens, heads, d]: every sequence with its mask. Divided at once: the gradient of each slice by itself would
    be as large as that of all."""
    each = zip(*(torch.split(states, list(lengths), dim=2) for states in (query, key, value)), masks, strict=True)
    outputs = [
        sdpa_attention_forward(module, own_query, own_key, own_value, mask, **options)[0]
        for own_query, own_key, own_value, mask in each
    ]
    return torch.cat(outputs, dim=1)


def _parts(lengths: Sequence[int]) -> list[slice]:
    ends = list(accumulate(lengths))
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


class Pattern:
    """What tokens of a sequence see (windows, chunks): transformers' mask before it is made.

    A model makes masks for the tokens that it is given, which of a row that ranks share are some.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def mask(self, length: int) -> torch.Tensor | None:
        """[1, 1, length, length]; None if every token sees all those before it."""
        return sdpa_mask(1, length, length, **self._options)


def describe_mask(mask_function: Callable[..., Any], **options: Any) -> Pattern | None:
    """Return the pattern instead of a mask."""
    if mask_function is causal_mask_function:
        return None
    kept = ("local_size", "allow_is_causal_skip", "use_vmap", "device")
    return Pattern({"mask_function": mask_function} | {name: options[name] for name in kept if name in options})


def attend_shared(
    module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Pattern | None, **options: Any
) -> Any:
    """torch's fused attention for each sequence of a row that ranks share: this one's heads of all tokens.

    Of keys and values that have fewer heads than there are ranks, several ranks have the same. Raises TypeError for
    attention to anything but the sequences of the row.
    """
    lengths, sharers = options.pop(LENGTHS, None), options.pop(SHARERS, None) or Sharers()
    if not lengths:
        raise TypeError(f"{type(module).__name__} is not told which sequences are in a row")
    if query.shape[2] != key.shape[2] or options.get("position_bias") is not None:
        raise TypeError(f"{type(module).__name__} attends to more than the tokens of a row")
    if attention_mask is not None and not isinstance(attention_mask, Pattern):
        raise TypeError(f"{type(module).__name__} makes masks of its own")
    copies = sharers.copies(key.shape[1])
    query = sharers.heads_of_all(query)
    key, value = (sharers.heads_of_all(states.repeat_interleave(copies, dim=1)) for states in (key, value))
    heads: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1])
    heads.is_causal = getattr(module, "is_causal", True)
    masks = [None if attention_mask is None else attention_mask.mask(length) for length in lengths]
    return sharers.tokens_of_all(_attended(heads, query, key, value, lengths, masks, options)), None


ALL_ATTENTION_FUNCTIONS.register(EXACT, exact.attend_exactly)
ALL_MASK_ATTENTION_FUNCTIONS.register(EXACT, exact.no_mask)
ALL_ATTENTION_FUNCTIONS.register(SHARED, attend_shared)
ALL_MASK_ATTENTION_FUNCTIONS.register(SHARED, describe_mask)
ALL_ATTENTION_FUNCTIONS.register(BY_SEQUENCE, attend_by_sequence)
ALL_MASK_ATTENTION_FUNCTIONS.register(BY_SEQUENCE, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def attend_sequences_apart(model: PreTrainedModel) -> None:
    """Replace torch's fused attention, where `model` uses that, by the same for each sequence. A vision tower, which
    keeps pictures apart by itself, has its own."""
    if attention(model) == "sdpa" and takes_other_attention(model):
        text = model.config.get_text_config()
        of_text = [name for name in model.config.sub_configs if getattr(model.config, name, None) is text]
        model.set_attn_implementation(dict.fromkeys(of_text, BY_SEQUENCE) or BY_SEQUENCE)


@torch.no_grad()
def keeps_sequences_apart(model: nn.Module, device: torch.device) -> bool:
    """Whether the outputs of a sequence in a row do not depend on the sequences before it.

    A collective: it calls the model twice, because no attribute shows it: states, convolutions, and masks that ignore
    positions mix sequences.
    """
    transformer: Any = model
    if remembers_tokens(model) or scales_by_column(model):
        return False
    first, second = PROBE
    most = min(transformer.config.get_text_config().vocab_size, 1000)
    ids = torch.randint(1, most, (2, first + second), generator=torch.Generator().manual_seed(0))
    ids[1, first:] = ids[0, first:]
    positions = torch.cat([torch.arange(length) for length in PROBE])[None].to(device)
    states: list[torch.Tensor] = []
    head = transformer.get_output_embeddings() or transformer.score
    handle = head.register_forward_pre_hook(lambda module, args: states.append(args[0][0, first:]))
    try:
        for row in ids:
            model(**row_inputs(model, row[None].to(device), positions, PROBE), use_cache=False)
    finally:
        handle.remove()
    one, other = (values.float() for values in states)
    leak = ((one - other).abs().max() / one.std()).reshape(1)
    dist.all_reduce(leak, op=dist.ReduceOp.MAX)
    return bool(leak < LEAK)


def places_pictures(config: PretrainedConfig) -> bool:
    """Whether it is of a model that sees whose tokens have positions in three directions, by its `get_rope_index`.
    Where they are in a row then matters to nothing else."""
    return sees(config) and "mrope_section" in (getattr(config.get_text_config(), "rope_parameters", None) or {})


def places_by_rows(config: PretrainedConfig) -> bool:
    """Whether it is of a model that sees and places pictures by a `get_rope_index`, of which nothing else is known."""
    return sees(config) and hasattr(MODEL_MAPPING[type(config)], "get_rope_index") and not places_pictures(config)


def scales_by_column(model: nn.Module) -> bool:
    """Whether attention counts columns of a row (Llama 4, and beyond 8,192 of them): a probe is too short to tell."""
    transformer: Any = model
    return bool(getattr(transformer.config.get_text_config(), "attn_temperature_tuning", False))


def row_inputs(
    model: nn.Module,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    lengths: Sequence[int],
    sharers: Sharers | None = None,
) -> dict[str, Any]:
    """What `model` is called with for a row of sequences of `lengths`, or for the part of it that this rank has.

    `position_ids` [1, n], or [4, 1, n] of a model whose tokens have a place in a picture, too: transformers then finds
    the ends of sequences in the first ones, and turns by the other three.

    With a mask of ones it does not look for the ends of sequences in positions, which on a part may be elsewhere.
    """
    transformer: Any = model
    if position_ids.ndim == 2 and places_pictures(transformer.config):
        position_ids = position_ids.expand(4, -1, -1)
    given: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids}
    if attention(model) in (BY_SEQUENCE, EXACT):
        given[LENGTHS] = list(lengths)
    elif attention(model) == SHARED:
        given |= {LENGTHS: list(lengths), SHARERS: sharers, "attention_mask": torch.ones_like(input_ids)}
    return given
