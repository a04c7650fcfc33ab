"""Faults that a test puts into a real engine, and takes out again."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from verl.mismatch.places import decoder_layers


class Faults:
    """Those that vLLM's and SGLang's modules share. `inject` returns False if the model has no such part."""

    def inject(self, fault: str) -> bool:
        self._undone = []
        self._model = self._engine_model()
        path, self._layers = decoder_layers(self._model)
        self._root = self._model.get_submodule(path.rpartition(".")[0])
        try:
            getattr(self, f"_{fault}")()
        except AttributeError:
            self.undo()
            return False
        return True

    def undo(self) -> None:
        for undo in self._undone:
            undo()

    def _after(self, module, change):
        """`change` what a module returns: the first tensor."""

        def hook(_module, _arguments, returned):
            return (change(returned[0]), *returned[1:]) if isinstance(returned, tuple) else change(returned)

        self._undone.append(module.register_forward_hook(hook).remove)

    def _before(self, module, change):
        """`change` the arguments of a module."""

        def hook(_module, arguments, options):
            return change(arguments, dict(options))

        self._undone.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _set(self, owner, name, value):
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undone.append(lambda: setattr(owner, name, before))

    def _write(self, tensor, value):
        before = tensor.clone()
        with torch.inference_mode():
            tensor.copy_(value)
        self._undone.append(lambda: tensor.data.copy_(before))

    def _nothing(self):
        """The engine as it is."""

    def _stale_tensor(self):
        weight = self._layers[1].input_layernorm.weight
        self._write(weight.data, weight.data.roll(1))

    def _norm_scale(self):
        self._after(self._layers[1].input_layernorm, lambda states: states * 1.1)

    def _norm_channel(self):
        def change(states):
            states = states.clone()
            states[..., 5] *= 1.25
            return states

        self._after(self._layers[0].post_attention_layernorm, change)

    def _norm_epsilon(self):
        norm = self._layers[0].input_layernorm
        states = self._embeddings()
        scale = float(getattr(self._root, "normalizer", 1.0)) ** 2  # of Gemma's embeddings
        self._set(norm, "variance_epsilon", float(states.float().pow(2).mean()) * scale * 0.2)

    def _embeddings(self):
        files = sorted(Path(self._directory()).glob("*.safetensors"))
        return next(
            tensor for file in files for name, tensor in load_file(file).items() if name.endswith("embed_tokens.weight")
        )

    def _last_norm(self):
        self._after(self._root.norm, lambda states: states * 1.05)

    def _query_norm(self):
        self._after(self._layers[1].self_attn.q_norm, lambda states: states * 1.1)

    def _rope_base(self):
        for layer in self._layers:
            rotary = layer.self_attn.rotary_emb
            table = rotary.cos_sin_cache
            half = table.shape[-1] // 2
            angles = torch.outer(
                torch.arange(len(table)).float(), 1.0 / 500000.0 ** (torch.arange(half).float() / half)
            )
            self._write(table, torch.cat([angles.cos(), angles.sin()], dim=-1).to(table.dtype))
            if rotary is self._layers[-1].self_attn.rotary_emb:
                return

    def _rope_positions(self):
        def change(arguments, options):
            return (arguments[0] + 1, *arguments[1:]), options

        for layer in self._layers[:1]:
            self._before(layer.self_attn.rotary_emb, change)

    def _rope_stretched(self):
        def change(arguments, options):
            return (arguments[0] * 2, *arguments[1:]), options

        self._before(self._layers[0].self_attn.rotary_emb, change)

    def _decode_alone(self):
        def change(states):
            return states * 1.05 if len(states) <= 4 else states

        self._after(self._layers[0].self_attn.attn, change)

    def _values(self):
        def change(states):
            states = states.clone()
            states[..., -8:] *= 1.1
            return states

        self._after(self._layers[0].self_attn.qkv_proj, change)

    def _query_of_a_key(self):
        """As where a converter exchanges both: the first head, before its norm if it has one."""
        attention = self._layers[0].self_attn
        size, width = attention.head_dim, attention.q_size

        def change(states):
            states = states.clone()
            query, key = states[..., :size].clone(), states[..., width : width + size].clone()
            states[..., :size], states[..., width : width + size] = key, query
            return states

        attention.q_norm  # noqa: B018 - without a norm these are queries that are turned otherwise
        self._after(attention.qkv_proj, change)

    def _output_projection(self):
        self._after(self._layers[1].self_attn.o_proj, lambda states: states * 1.1)

    def _activation(self):
        self._layers[0].mlp.down_proj  # noqa: B018 - a mixture has none

        def hook(_module, arguments, _returned):
            gate, up = arguments[0].chunk(2, dim=-1)
            return torch.nn.functional.relu(gate) * up

        self._undone.append(self._layers[0].mlp.act_fn.register_forward_hook(hook).remove)

    def _multiplier(self):
        self._layers[0].mlp.down_proj  # noqa: B018
        self._after(self._layers[1].mlp, lambda states: states * 1.1)

    def _embedding_scale(self):
        self._after(self._root.embed_tokens, lambda states: states * 1.1)
