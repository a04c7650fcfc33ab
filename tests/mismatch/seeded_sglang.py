"""Faults that a test puts into a real rank of SGLang."""

from __future__ import annotations

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.runtime_context import get_server_args

from tests.mismatch.seeded import Faults
from verl.mismatch.sglang.rank import Probe


class FaultySGLang(Faults, Probe):
    """The extension of the rank. SGLang's attention for CPUs knows no soft cap."""

    def _engine_model(self):
        return self.model

    def _directory(self):
        return get_server_args().model_path

    def _positions(self):
        def change(arguments, options):
            return (arguments[0], arguments[1] + 1, *arguments[2:]), options

        self._before(self._root, change)

    def _tokens(self):
        def change(arguments, options):
            ids = arguments[0].clone()
            ids[-1] = (ids[-1] + 1) % 50
            return (ids, *arguments[1:]), options

        self._before(self._root, change)

    def _attention_scale(self):
        attention = self._layers[1].self_attn.attn
        self._set(attention, "scaling", attention.scaling * 2**0.5)

    def _window(self):
        self._set(self._layers[0].self_attn.attn, "sliding_window_size", 2)

    def _head_scale(self):
        def hook(_module, _arguments, returned):
            returned.next_token_logits = returned.next_token_logits * 0.9
            return returned

        self._undone.append(self._model.logits_processor.register_forward_hook(hook).remove)

    def _temperature_twice(self):
        def change(sampling, logits):
            sampling.temperatures = sampling.temperatures**2

        self._sampling(change)

    def _logit_bias(self):
        def change(sampling, logits):
            logits[:, 7] += 2.0

        self._sampling(change)

    def _sampling(self, change):
        original = Sampler.forward

        def sample(sampler, output, sampling, *arguments, **options):
            before = sampling.temperatures
            change(sampling, output.next_token_logits)
            try:
                return original(sampler, output, sampling, *arguments, **options)
            finally:
                sampling.temperatures = before

        self._set(Sampler, "forward", sample)

    def _swapped_experts(self):
        order = torch.tensor([1, 0, 2, 3])

        def hook(_module, _arguments, returned):
            return returned._replace(topk_ids=order[returned.topk_ids.long()].to(returned.topk_ids.dtype))

        self._undone.append(self._layers[0].mlp.topk.register_forward_hook(hook).remove)
