"""What the tiny models of the matrix are: one row each, in the words of its own configuration class.

Every kind of layer that an architecture has occurs, and its switches stand so that they matter at the lengths of the
tests: windows of 8 tokens, biases, scalings that are not 1. Attention heads have 32 columns, the fewest that vLLM's CPU
kernels take; where a configuration has no `head_dim` the hidden size gives them.
"""

from __future__ import annotations

from typing import Any

from verl.utils.builtin.tokenizer import VOCAB_SIZE

Config = dict[str, Any]

WINDOW = 8
PAD_ID, END_ID = 256, 257
"""Of the built-in tokenizer."""

_TOKENS: Config = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD_ID, "bos_token_id": END_ID, "eos_token_id": END_ID}
_SIZES: Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_HEAD: Config = {"head_dim": 32}
_WIDE: Config = {"hidden_size": 128}
_TIED: Config = {"tie_word_embeddings": True}
_EQUAL_HEADS: Config = {"num_key_value_heads": 4}
_WINDOWS: Config = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_SCALINGS: Config = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
_EXPERTS: Config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LOCAL_EXPERTS: Config = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
_ROUTED: Config = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
_FIRST_DENSE: Config = {"first_k_dense_replace": 1}
_LATENT: Config = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
_INDEXED: Config = {"index_topk": 4, "index_n_heads": 16, "index_head_dim": 32}
"""With so many heads no key has a score of 0, of which the choice is anybody's."""
_SECOND_SPARSE: Config = {"mlp_layer_types": ["dense", "sparse"]}
_DELTA_NET: Config = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA: Config = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_GPT2: Config = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256}
_BYTES: Config = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "hidden_size_global": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def _like(*parts: Config, **own: Any) -> Config:
    """The usual sizes, `parts` over them in order, `own` over all."""
    return _only(_SIZES, *parts, own)


def _only(*parts: Config, **own: Any) -> Config:
    """For configurations that name their sizes in other words."""
    return {key: value for part in (_TOKENS, *parts, own) for key, value in part.items()}


DENSE: dict[str, Config] = {
    "llama": _like(_HEAD),
    "mistral": _like(_HEAD, sliding_window=WINDOW),
    "ministral": _like(_HEAD, _WINDOWS),
    "ministral3": _like(_HEAD),
    "qwen2": _like(_WIDE),
    "qwen3": _like(_HEAD),
    "gemma": _like(_HEAD),
    "gemma2": _like(_HEAD, _WINDOWS, query_pre_attn_scalar=24),
    "gemma3_text": _like(_HEAD, _WINDOWS, query_pre_attn_scalar=24),
    "gemma3n_text": _like(
        _HEAD,
        _WINDOWS,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        intermediate_size=[96] * 4,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=32,
        altup_num_inputs=2,
        laurel_rank=16,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
    ),
    "gemma4_text": _like(
        _HEAD,
        _WINDOWS,
        global_head_dim=64,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=32,
        final_logit_softcapping=20.0,
    ),
    "vaultgemma": _like(_HEAD, _WINDOWS, query_pre_attn_scalar=24),
    "phi": _like(_WIDE, _EQUAL_HEADS, qk_layernorm=False),
    "phi3": _like(_WIDE, sliding_window=WINDOW),
    "starcoder2": _like(_WIDE, sliding_window=WINDOW),
    "stablelm": _like(_WIDE, use_qkv_bias=True),
    "olmo": _like(_WIDE, clip_qkv=1.0),
    "olmo2": _like(_WIDE),
    "olmo3": _like(_WIDE, _WINDOWS),
    "cohere": _like(_WIDE, use_qk_norm=True, logit_scale=0.5),
    "cohere2": _like(_WIDE, _WINDOWS, logit_scale=0.5),
    "glm": _like(_HEAD),
    "glm4": _like(_HEAD),
    "granite": _like(_WIDE, _SCALINGS),
    "hyperclovax": _like(_HEAD, _SCALINGS),
    "nemotron": _like(_HEAD),
    "smollm3": _like(_WIDE, no_rope_layers=[1, 0]),
    "exaone4": _like(_WIDE, _WINDOWS),
    "seed_oss": _like(_HEAD, attention_dropout=0.0, residual_dropout=0.0),
    "hunyuan_v1_dense": _like(_HEAD),
    "ernie4_5": _like(_HEAD, use_bias=True),
    "apertus": _like(_WIDE),
    "arcee": _like(_HEAD),
    "helium": _like(_WIDE, _HEAD),
    "bitnet": _like(_WIDE),
    "diffllama": _like(_HEAD),
    "doge": _like(_WIDE, keep_window_size=WINDOW),
    "minicpm3": _like(_LATENT, _EQUAL_HEADS, dim_model_base=32),
    # Its own init sets the padding row to 0 after loading, whatever the file says; its models have no padding token.
    "youtu": _like(_LATENT, _EQUAL_HEADS, pad_token_id=None),
    "cwm": _like(_HEAD, _WINDOWS),
    "jais2": _like(_HEAD),
    "nanochat": _like(_WIDE),
    "persimmon": _like(_WIDE),
    "granite_swa": _like(_WIDE, _SCALINGS, _WINDOWS, layer_rope_theta=[10000.0, 500.0]),
    "gemma4_unified_text": _like(_HEAD, _WINDOWS, final_logit_softcapping=20.0),
    "cohere_compass_text": _like(
        _HEAD,
        _WINDOWS,
        logit_scale=0.5,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 6, 4]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [6, 6, 4]},
        },
    ),
    "blt": _only(
        **{f"{part}_config": _BYTES for part in ("patcher", "encoder", "decoder", "global")},
        encoder_hash_byte_group_vocab=500,
    ),
    "hrm_text": _like(_HEAD, num_layers_per_stack=1),
    "modernbert-decoder": _like(_WIDE, _WINDOWS, local_attention=2 * WINDOW),
}

GPT_LIKE: dict[str, Config] = {
    "gpt2": _only(_GPT2),
    "gpt_bigcode": _only(_GPT2),
    "gpt_neo": _only(
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=256,
        window_size=WINDOW,
    ),
    "gpt_neox": _like(_WIDE, _EQUAL_HEADS),
    "gptj": _only(_GPT2, rotary_dim=16),
    "codegen": _only(_GPT2, rotary_dim=16),
    "opt": _only(hidden_size=128, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256),
    "bloom": _only(hidden_size=128, n_layer=2, n_head=4),
    "falcon": _only(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True
    ),
    "mpt": _only(d_model=128, n_heads=4, n_layers=2, max_seq_len=256),
    "biogpt": _like(_WIDE),
    "xglm": _only(d_model=128, ffn_dim=96, num_layers=2, attention_heads=4, max_position_embeddings=256),
    "gpt_neox_japanese": _like(_WIDE, intermediate_multiple_size=2),
    "openai-gpt": _only(_GPT2),
    "ctrl": _only(_GPT2, dff=96),
    "bert-generation": _like(_WIDE, is_decoder=True),
    "trocr": _only(
        d_model=128, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96, max_position_embeddings=256
    ),
}

EXPERTS: dict[str, Config] = {
    "mixtral": _like(_HEAD, _LOCAL_EXPERTS),
    "qwen2_moe": _like(_WIDE, _EXPERTS, shared_expert_intermediate_size=64, mlp_only_layers=[1]),
    "qwen3_moe": _like(_HEAD, _EXPERTS),
    "olmoe": _like(_WIDE, num_experts=4, num_experts_per_tok=2, intermediate_size=64),
    "flex_olmo": _like(_WIDE, num_experts=4, num_experts_per_tok=2, intermediate_size=64),
    "phimoe": _like(_WIDE, _LOCAL_EXPERTS, attention_bias=True, lm_head_bias=True),
    "deepseek_v2": _like(_LATENT, _EQUAL_HEADS, _ROUTED, _FIRST_DENSE),
    "deepseek_v3": _like(_LATENT, _EQUAL_HEADS, _ROUTED, _FIRST_DENSE, topk_method="noaux_tc"),
    "deepseek_v32": _like(_LATENT, _EQUAL_HEADS, _ROUTED, _FIRST_DENSE, _INDEXED),
    "glm_moe_dsa": _like(_LATENT, _EQUAL_HEADS, _ROUTED, _INDEXED, _SECOND_SPARSE),
    "axk2": _like(_LATENT, _EQUAL_HEADS, _ROUTED, _INDEXED, _SECOND_SPARSE),
    "hy_v4": _like(_LATENT, _EQUAL_HEADS, _ROUTED, _INDEXED, _SECOND_SPARSE),
    "glm4_moe": _like(_HEAD, _ROUTED, _FIRST_DENSE, use_qk_norm=True, attention_bias=True),
    "glm4_moe_lite": _like(_LATENT, _EQUAL_HEADS, _ROUTED, mlp_layer_types=["dense", "sparse"], topk_method="noaux_tc"),
    "dots1": _like(_WIDE, _ROUTED, _FIRST_DENSE, layer_types=["full_attention"] * 2, topk_method="noaux_tc"),
    "minimax_m2": _like(_HEAD, _LOCAL_EXPERTS, rotary_dim=16, scoring_func="sigmoid", use_routing_bias=True),
    "gpt_oss": _like(_HEAD, _LOCAL_EXPERTS, _WINDOWS),
    "laguna": _like(_HEAD, _EXPERTS, _WINDOWS, shared_expert_intermediate_size=64),
    "granitemoe": _like(_WIDE, _LOCAL_EXPERTS, _SCALINGS),
    "granitemoeshared": _like(_WIDE, _LOCAL_EXPERTS, _SCALINGS, shared_intermediate_size=64),
    "hunyuan_v1_moe": _like(_HEAD, num_experts=4, moe_topk=[2, 2], intermediate_size=64),
    "ernie4_5_moe": _like(
        _WIDE, moe_num_experts=4, moe_k=2, moe_intermediate_size=64, moe_num_shared_experts=1, moe_layer_start_index=1
    ),
    "jetmoe": _like(_EQUAL_HEADS, _LOCAL_EXPERTS, kv_channels=32, num_key_value_heads=2),
    "longcat_flash": _only(
        _LATENT,
        hidden_size=64,
        num_layers=1,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=64,
        moe_topk=2,
        n_routed_experts=4,
        zero_expert_num=2,
        max_position_embeddings=256,
    ),
    "llama4_text": _like(
        _HEAD,
        _LOCAL_EXPERTS,
        num_experts_per_tok=1,
        intermediate_size_mlp=96,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 0],
        attention_chunk_size=WINDOW,
    ),
    "exaone_moe": _like(
        _HEAD,
        _EXPERTS,
        _WINDOWS,
        num_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        mlp_layer_types=["dense", "sparse"],
    ),
    "afmoe": _like(_HEAD, _EXPERTS, _WINDOWS, num_shared_experts=1, num_dense_layers=1, route_scale=1.5),
    "solar_open": _like(_HEAD, _ROUTED),
    "dbrx": _only(
        d_model=128,
        n_heads=4,
        n_layers=2,
        max_seq_len=256,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 128},
    ),
    "aria_text": _like(_HEAD, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1, intermediate_size=64),
    "axk1": _like(_LATENT, _EQUAL_HEADS, _ROUTED, _FIRST_DENSE),
    "cohere2_moe": _like(
        _HEAD,
        _WINDOWS,
        num_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=1,
        logit_scale=0.5,
        mlp_layer_types=["dense", "sparse"],
        prefix_dense_intermediate_size=96,
    ),
    "granitemoe_swa": _like(
        _WIDE, _LOCAL_EXPERTS, _SCALINGS, _WINDOWS, shared_intermediate_size=64, layer_rope_theta=[10000.0, 500.0]
    ),
    "hy_v3": _like(_HEAD, _EXPERTS, _SECOND_SPARSE, num_shared_experts=1),
    "mellum": _like(_HEAD, _LOCAL_EXPERTS, _WINDOWS, moe_intermediate_size=64),
    "mimo_v2_flash": _like(_HEAD, _ROUTED, _WINDOWS, _SECOND_SPARSE, v_head_dim=16, num_experts_per_tok=2),
    "minimax_m3_vl_text": _like(
        _HEAD,
        _LOCAL_EXPERTS,
        _SECOND_SPARSE,
        dense_intermediate_size=96,
        shared_intermediate_size=64,
        rotary_dim=16,
        index_n_heads=2,
        index_head_dim=32,
        index_block_size=4,
        index_topk_blocks=2,
        layer_types=["full_attention", "minimax_m3_sparse"],
    ),
    "deepseek_v4": _like(
        _ROUTED,
        num_hidden_layers=3,
        num_key_value_heads=1,
        head_dim=32,
        q_lora_rank=48,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        mlp_layer_types=["hash_moe", "moe", "moe"],
        sliding_window=WINDOW,
        o_groups=2,
        o_lora_rank=32,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=2,
        hc_mult=2,
        qk_rope_head_dim=16,
        partial_rotary_factor=0.5,
    ),
}

STATE_SPACE: dict[str, Config] = {
    "mamba": _only(hidden_size=64, num_hidden_layers=2, state_size=16),
    "falcon_mamba": _only(hidden_size=64, num_hidden_layers=2, state_size=16),
    "mamba2": _only(
        hidden_size=64, num_hidden_layers=2, num_heads=4, head_dim=32, state_size=16, n_groups=2, chunk_size=16
    ),
    "bamba": _like(_WIDE, _MAMBA, attn_layer_indices=[1]),
    "falcon_h1": _like(_HEAD, _MAMBA, mamba_d_ssm=256, key_multiplier=0.5, lm_head_multiplier=0.5),
    "granitemoehybrid": _like(
        _WIDE,
        _MAMBA,
        _LOCAL_EXPERTS,
        _SCALINGS,
        shared_intermediate_size=64,
        layer_types=["mamba", "attention"],
        position_embedding_type="rope",
    ),
    "nemotron_h": _like(
        _HEAD,
        layers_block_type=["mamba", "attention", "moe", "mlp"],
        num_hidden_layers=4,
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
    ),
    "jamba": _like(
        _WIDE,
        num_experts=4,
        num_experts_per_tok=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=16,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "zamba2": _like(
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "mamba"],
        num_key_value_heads=4,
        mamba_d_state=16,
        mamba_ngroups=2,
        n_mamba_heads=4,
        chunk_size=16,
        num_mem_blocks=1,
        use_shared_attention_adapter=True,
        adapter_rank=8,
        use_mem_rope=True,
    ),
    "recurrent_gemma": _like(_WIDE, num_hidden_layers=3, attention_window_size=WINDOW, lru_width=128),
    "qwen3_next": _like(_HEAD, _EXPERTS, _DELTA_NET, shared_expert_intermediate_size=64),
    "qwen3_5_text": _like(_HEAD, _DELTA_NET),
    "qwen3_5_moe_text": _like(_HEAD, _EXPERTS, _DELTA_NET, shared_expert_intermediate_size=64),
    "olmo_hybrid": _like(_WIDE, _DELTA_NET, linear_num_key_heads=4),
    "minimax": _like(_HEAD, _LOCAL_EXPERTS, layer_types=["linear_attention", "full_attention"], block_size=16),
    "lfm2": _like(
        _WIDE, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, conv_dim=128, block_dim=128
    ),
    "lfm2_moe": _like(_WIDE, _EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1),
    "xlstm": _only(hidden_size=128, num_heads=4, num_blocks=2, chunk_size=16),
    "rwkv": _only(hidden_size=64, num_hidden_layers=2, context_length=256),
    "kimi_linear": _like(
        _LATENT,
        _EQUAL_HEADS,
        q_lora_rank=None,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
        linear_head_dim=32,
        linear_num_heads=4,
    ),
    "zamba": _like(
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        attention_hidden_size=128,
        attention_head_dim=32,
        num_key_value_heads=4,
        n_mamba_heads=2,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "zaya": _like(
        _HEAD,
        _EXPERTS,
        num_experts_per_tok=1,
        layer_types=["hybrid", "hybrid_sliding"],
        sliding_window=WINDOW,
        router_hidden_size=32,
    ),
    "inkling_text": _like(
        _HEAD,
        _ROUTED,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=32,
        sliding_window_size=WINDOW,
        d_rel=4,
        rel_extent=16,
        layer_types=["hybrid_sliding", "hybrid"],
        mlp_layer_types=["dense", "sparse"],
        logits_mup_width_multiplier=1.0,
    ),
    "qwen4_exp_text": _like(
        _HEAD,
        _EXPERTS,
        _DELTA_NET,
        shared_expert_intermediate_size=64,
        layer_types=["linear_attention", "indexed_attention"],
        hc_count=2,
        hc_lowrank=16,
        ple_layer_ids=[],
        indexer_n_heads=16,
        indexer_kv_heads=1,
        indexer_head_dim=32,
        indexer_budget=4,
        indexer_compress_ratio=2,
    ),
}

_SEEING: Config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_SIGLIP: Config = _SEEING | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
_PIXTRAL: Config = _SEEING | {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 16}
_QWEN: Config = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
_LLAMA4: Config = _SEEING | {
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
_GEMMA4: Config = _SEEING | {"head_dim": 16, "num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 16}


def _around(kind: dict[str, Config], model_type: str, vision: Config, **more: Any) -> Config:
    """A model that sees, around a language model of `kind`."""
    return {"text_config": {"model_type": model_type, **kind[model_type]}, "vision_config": vision, **more}


WRAPPERS: dict[str, Config] = {
    "gemma3": _around(DENSE, "gemma3_text", _SIGLIP),
    "gemma4": _around(DENSE, "gemma4_text", _GEMMA4),
    "mistral3": _around(DENSE, "ministral3", _PIXTRAL, tie_word_embeddings=False),
    "llama4": _around(EXPERTS, "llama4_text", _LLAMA4),
    "qwen3_5": _around(STATE_SPACE, "qwen3_5_text", _QWEN),
    "qwen3_5_moe": _around(STATE_SPACE, "qwen3_5_moe_text", _QWEN),
}

KINDS: dict[str, dict[str, Config]] = {
    "dense": DENSE,
    "gpt": GPT_LIKE,
    "experts": EXPERTS,
    "state space or hybrid": STATE_SPACE,
    "around a language model": WRAPPERS,
}

ORIGINAL = 12
"""Tokens that stretched positions are made for: of the sequences of the tests, only some have more."""


def stretched(kind: str, **more: Any) -> Config:
    """Parameters of rotary embeddings of 32 columns."""
    if kind == "longrope":
        more |= {
            "short_factor": [1.0] * 16,
            "long_factor": [2.0 + pair for pair in range(16)],
            "original_max_position_embeddings": ORIGINAL,
        }
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 6.0, **more}}


AGAIN: dict[str, tuple[str, Config, str]] = {
    "qwen2-tied": ("qwen2", DENSE["qwen2"] | _TIED, "the head is the embedding"),
    "qwen3-tied": ("qwen3", DENSE["qwen3"] | _TIED, "the head is the embedding"),
    "llama-biased": ("llama", DENSE["llama"] | {"attention_bias": True, "mlp_bias": True}, "biases everywhere"),
    "phi-qk-norm": ("phi", DENSE["phi"] | {"qk_layernorm": True}, "norms of queries and keys"),
    "falcon-alibi": (
        "falcon",
        GPT_LIKE["falcon"] | {"alibi": True, "new_decoder_architecture": False, "bias": True},
        "the first layout, one key head, biases, ALiBi",
    ),
    "gemma3-untied": ("gemma3_text", DENSE["gemma3_text"] | {"tie_word_embeddings": False}, "a head of its own"),
    "phi3-longrope": (
        "phi3",
        DENSE["phi3"] | stretched("longrope") | {"original_max_position_embeddings": ORIGINAL},
        "positions are stretched by the longest of a call, as in Phi-4-mini",
    ),
    "llama-dynamic": (
        "llama",
        DENSE["llama"] | stretched("dynamic") | {"max_position_embeddings": ORIGINAL},
        "positions are stretched by the longest of a call",
    ),
}
"""Other settings of an architecture: model type, configuration, what is different."""
