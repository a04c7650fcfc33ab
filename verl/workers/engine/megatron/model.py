"""Make Megatron's `GPTModel` from a Hugging Face config."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.nn import functional

from verl.checkpoint_engine.errors import PlanError
from verl.workers.config.megatron import MegatronConfig
from verl.workers.engine.fsdp.mesh import DTYPES
from verl.workers.engine.megatron import library
from verl.workers.engine.megatron.architectures import Architecture
from verl.workers.engine.megatron.layout import Dimensions, LocalTensor, ParallelSizes

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@library.quiet()
def make_model(
    hf_config: Any,
    config: MegatronConfig,
    *,
    architecture: Architecture,
    dims: Dimensions,
    sizes: ParallelSizes,
    device: torch.device,
    recompute: bool,
    drops: bool,
) -> torch.nn.Module:
    """This rank's part of the model, with all weights 0. Megatron's groups must exist.

    Attention `drops` what `hf_config` says; no other part of these architectures has a dropout.
    """
    place = sizes.of(torch.distributed.get_rank())
    rope = hf_config.rope_parameters
    transformer = _transformer_config(hf_config, config, architecture, dims, sizes, device, recompute, drops)
    stages = sizes.stages(dims.layers)
    assert stages is not None  # checked before any process started
    model: Any = library.GPTModel(
        config=transformer,
        transformer_layer_spec=_layers(architecture, dims, len(stages[place.pipeline])),
        vocab_size=dims.padded_vocab,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=place.pipeline == 0,
        post_process=place.pipeline == sizes.pipeline - 1,
        share_embeddings_and_output_weights=dims.tied,
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rope_scaling=rope.get("rope_type", "default") == "llama3",
        rope_scaling_factor=rope.get("factor", 1.0),
    )
    if dims.labels and model.post_process:  # Megatron's own, as large as the embeddings, is freed at once
        model.output_layer = ValueHead(dims, transformer)
    model.to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # also the rows that stand for no token, which no checkpoint fills
    return cast("torch.nn.Module", model)


class ValueHead(torch.nn.Module):
    """Replaces Megatron's `output_layer` in a critic. Every tensor-parallel rank has the whole head.

    With sequence parallelism each rank applies it to its own tokens, and its gradients are partial, as those of norms.
    """

    def __init__(self, dims: Dimensions, config: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(dims.labels, dims.hidden, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.empty(dims.labels, dtype=config.params_dtype))
        self._sequence_parallel = config.sequence_parallel

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[s, b, labels], from hidden states [s, b, h] of all tokens or of this rank's."""
        values = functional.linear(hidden_states, self.weight, self.bias)
        if self._sequence_parallel:
            # Every rank computes the whole loss of all tokens: the gradients of its own are complete.
            values = library.gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def _transformer_config(
    hf_config: Any,
    config: MegatronConfig,
    architecture: Architecture,
    dims: Dimensions,
    sizes: ParallelSizes,
    device: torch.device,
    recompute: bool,
    drops: bool,
) -> Any:
    dtype = DTYPES[config.dtype]
    overrides = {
        key: value
        for key, value in config.override_transformer_config.items()
        if recompute or not key.startswith("recompute_")
    }
    fields: dict[str, Any] = dict(
        num_layers=dims.layers,
        hidden_size=dims.hidden,
        num_attention_heads=dims.heads,
        num_query_groups=dims.groups,
        kv_channels=dims.head_dim,
        ffn_hidden_size=dims.ffn,
        **(_experts(hf_config, dims) if dims.experts else {}),
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        sequence_parallel=config.sequence_parallel,
        num_layers_in_first_pipeline_stage=sizes.first_stage_layers,
        num_layers_in_last_pipeline_stage=sizes.last_stage_layers,
        account_for_embedding_in_pipeline_split=sizes.counts_embedding,
        account_for_loss_in_pipeline_split=sizes.counts_loss,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        qk_layernorm=architecture.has("q_layernorm.weight"),
        add_bias_linear=False,
        add_qkv_bias=architecture.has("linear_qkv.bias"),
        gated_linear_unit=True,
        activation_func=functional.silu,
        hidden_dropout=0.0,
        attention_dropout=getattr(hf_config, "attention_dropout", 0.0) if drops else 0.0,
        attention_softmax_in_fp32=True,
        apply_query_key_layer_scaling=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        batch_p2p_sync=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        **(RECOMPUTE if recompute and "recompute_granularity" not in overrides else {}),
    )
    return library.TransformerConfig(**fields | overrides)


def _layers(architecture: Architecture, dims: Dimensions, count: int) -> Any:
    """Of one stage: Megatron's own, with our norms."""
    has_qk_norms = architecture.has("q_layernorm.weight")
    layer = library.get_gpt_layer_local_spec(
        num_experts=dims.experts or None, qk_layernorm=has_qk_norms, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if has_qk_norms:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = Norm
    return library.TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm)


class Norm:
    """Makes torch's RMSNorm, as Megatron's wrapper of it does, which refuses sequence parallelism.

    The gradients of its weight are those of a rank's own tokens then; `optimizer.Optimizer` adds them up.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.RMSNorm:  # type: ignore[misc]
        return torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)


def _experts(hf_config: Any, dims: Dimensions) -> dict[str, Any]:
    return {
        "num_moe_experts": dims.experts,
        "moe_ffn_hidden_size": dims.expert_ffn,
        "moe_router_topk": hf_config.num_experts_per_tok,
        # Of the likeliest experts: a softmax over all and then their own share of it, or over them alone, is the same.
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
    }


def require_same_tensors(model: torch.nn.Module, tensors: list[LocalTensor]) -> None:
    """Raises PlanError listing tensors that only `GPTModel` or only the map has."""
    have = {name for name, _ in model.named_parameters()}
    mapped = {tensor.name for tensor in tensors}
    if have != mapped:
        unmapped, absent = (", ".join(sorted(names)) or "none" for names in (have - mapped, mapped - have))
        raise PlanError(
            f"the map of this architecture does not fit Megatron's model; in the model only: {unmapped}; "
            f"in the map only: {absent}"
        )
