"""A Llama whose class freezes its embeddings and a matrix of its first layer. Imported as `model.external_lib`."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

FROZEN = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")


class FrozenLlamaConfig(LlamaConfig):
    model_type = "frozen_llama"


class FrozenLlama(LlamaForCausalLM):
    config_class = FrozenLlamaConfig

    def __init__(self, config: FrozenLlamaConfig) -> None:
        super().__init__(config)
        for name in FROZEN:
            self.get_parameter(name).requires_grad_(False)


AutoConfig.register("frozen_llama", FrozenLlamaConfig)
AutoModelForCausalLM.register(FrozenLlamaConfig, FrozenLlama)
