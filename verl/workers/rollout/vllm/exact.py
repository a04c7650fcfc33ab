"""The trainer's own model inside vLLM: transformers' modules, and attention over vLLM's paged cache.

vLLM's layers fuse projections and pack weights for their own kernels. This model makes the same calls as a trainer,
with the tokens of an engine step instead of whole sequences.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.worker.cpu_worker import CPUWorker

from verl.checkpoint_engine.compat.torch import replace_tensors
from verl.checkpoint_engine.plan.types import Box
from verl.workers.hf.building import parameters_on_meta
from verl.workers.hf.checkpoint import HFCheckpoint
from verl.workers.hf.conversion import conversion_of
from verl.workers.hf.exact import agree, attend_in_pages, no_mask, product

ARCHITECTURE = "VerlExactForCausalLM"
PAGED = "verl_exact_paged"


def register() -> None:
    """Make `ARCHITECTURE` known to vLLM, in this process."""
    ModelRegistry.register_model(ARCHITECTURE, ExactForCausalLM)


class ExactWorker(CPUWorker):  # type: ignore[misc]
    """A worker in the process of the engine core, where the model is registered."""

    def init_device(self) -> None:
        register()
        super().init_device()


class ExactForCausalLM(nn.Module):
    """A causal LM of transformers, for a vLLM of one rank on a CPU. Its parameters have their names in checkpoints."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = copy.deepcopy(vllm_config.model_config.hf_config)
        dtype = vllm_config.model_config.dtype
        with parameters_on_meta():
            auto: Any = AutoModelForCausalLM
            whole = auto.from_config(config, dtype=dtype, attn_implementation=PAGED)
        agree(whole)
        with HFCheckpoint(Path(vllm_config.model_config.model)) as checkpoint:
            self._conversion = conversion_of(whole, checkpoint.shapes)
        self.model = whole.model
        if whole.lm_head.weight is not whole.model.embed_tokens.weight:
            self.lm_head = whole.lm_head  # vLLM reloads layers one by one, which would untie it
        device = torch.get_default_device()
        replace_tensors(self, lambda each: torch.empty_like(each, device=device) if each.is_meta else each)
        for parameter in self.parameters():
            parameter.weight_loader = fill_box  # type: ignore[attr-defined]
        for index, layer in enumerate(self.model.layers):
            attention = layer.self_attn
            attention.paged = Attention(
                config.num_attention_heads,
                attention.head_dim,
                attention.scaling,
                num_kv_heads=config.num_key_value_heads,
                cache_config=vllm_config.cache_config,
                prefix=f"model.layers.{index}.self_attn.paged",
                attn_backend=PagedBackend,
            )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.embed_tokens(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
    ) -> torch.Tensor:
        """[tokens, width]."""
        states = self.model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = states.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        head = getattr(self, "lm_head", None)
        logits: torch.Tensor = head(hidden_states) if head else product(hidden_states, self.model.embed_tokens.weight)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            for target, piece in () if name in self._conversion.copies else self._conversion.parts_of(name):
                parameter: Any = parameters[target]
                box = piece.origin_box
                values = piece.to_rearranged(tensor[tuple(map(slice, box.start, box.stop))])
                parameter.weight_loader(parameter, values, piece.box)
                loaded.add(target)
        return loaded


def fill_box(param: nn.Parameter, values: torch.Tensor, box: Box) -> None:
    """A weight loader in vLLM's sense: a reload calls it later, with another tensor as the argument named `param`."""
    param.data[tuple(map(slice, box.start, box.stop))].copy_(values)


def attend_paged(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """An attention implementation for transformers: [1, heads, tokens, d] of all requests of a step."""
    states = [each[0].transpose(0, 1).flatten(1) for each in (query, key, value)]
    return module.paged(*states)[None], None


ALL_ATTENTION_FUNCTIONS.register(PAGED, attend_paged)
ALL_MASK_ATTENTION_FUNCTIONS.register(PAGED, no_mask)


class PagedBackend(CPUAttentionBackend):  # type: ignore[misc]
    """`attend` over the cache of vLLM for CPUs, of which a block is [heads, tokens, key and value]."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # every one

    @staticmethod
    def get_impl_cls() -> Any:
        return _PagedAttention

    @staticmethod
    def get_builder_cls() -> Any:
        return _Builder


@dataclass
class _Requests:
    """Those of one engine step."""

    new_ends: list[int]
    """Where the new tokens of each end in the step."""
    ends: list[int]
    """Where its tokens end, with those before, if all have them one after the other."""
    pages: torch.Tensor
    """[tokens, 2]: the block of each of these tokens, and the place in it."""


class _Builder(AttentionMetadataBuilder[_Requests]):  # type: ignore[misc]
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> _Requests:
        given, size = common_attn_metadata, self.kv_cache_spec.block_size
        lengths = given.seq_lens.long()
        ends = lengths.cumsum(0)
        requests = torch.arange(len(lengths)).repeat_interleave(lengths)
        tokens = torch.arange(len(requests)) - (ends - lengths)[requests]
        pages = torch.stack([given.block_table_tensor[requests, tokens // size], tokens % size], dim=1)
        return _Requests(given.query_start_loc[1:].tolist(), ends.tolist(), pages)


class _PagedAttention(AttentionImpl[_Requests]):  # type: ignore[misc]
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        self.scale = scale
        self.kv_cache_dtype = kv_cache_dtype

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        size = kv_cache.shape[2]
        taken = slot_mapping.long()
        kv_cache[taken // size, :, taken % size] = torch.cat([key, value], dim=-1)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: _Requests | None,
        output: torch.Tensor,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        of, new = attn_metadata, attn_metadata.new_ends[-1]
        keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
        output[:new] = attend_in_pages(query[:new], keys, values, self.scale, of.pages, of.new_ends, of.ends)
        return output
