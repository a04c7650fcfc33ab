"""Faults that a test puts into a real vLLM worker."""

from __future__ import annotations

import torch

from tests.mismatch.seeded import Faults
from verl.mismatch.vllm.worker import Probe


class FaultyVLLM(Faults, Probe):
    """The extension of the worker."""

    def _engine_model(self):
        return self.model_runner.get_model()

    def _directory(self):
        return self.vllm_config.model_config.model

    def _positions(self):
        def change(arguments, options):
            return arguments, options | {"positions": options["positions"] + 1}

        self._before(self._model, change)

    def _tokens(self):
        def change(arguments, options):
            ids = options["input_ids"].clone()
            ids[-1] = (ids[-1] + 1) % 50
            return arguments, options | {"input_ids": ids}

        self._before(self._model, change)

    def _attention_scale(self):
        implementation = self._layers[1].self_attn.attn.impl
        self._set(implementation, "scale", implementation.scale * 2**0.5)

    def _missing_softcap(self):
        implementation = self._layers[1].self_attn.attn.impl
        if not implementation.logits_soft_cap:
            raise AttributeError
        self._set(implementation, "logits_soft_cap", 0)

    def _missing_last_softcap(self):
        if self._model.logits_processor.soft_cap is None:
            raise AttributeError
        self._set(self._model.logits_processor, "soft_cap", None)

    def _window(self):
        implementation = self._layers[0].self_attn.attn.impl
        self._set(implementation, "sliding_window", 3)

    def _head_scale(self):
        self._scores(lambda states, logits: logits * 0.9)

    def _scores(self, change):
        original = self._model.compute_logits
        object.__setattr__(self._model, "compute_logits", lambda states: change(states, original(states)))
        self._undone.append(lambda: object.__delattr__(self._model, "compute_logits"))

    def _temperature_twice(self):
        sampler = self.model_runner.sampler
        original = sampler.apply_temperature
        sampler.apply_temperature = lambda logits, temp, all_random: original(
            original(logits, temp, all_random), temp, all_random
        )
        self._undone.append(lambda: delattr(sampler, "apply_temperature"))

    def _logit_bias(self):
        sampler = self.model_runner.sampler
        original = sampler.apply_temperature

        def biased(logits, *arguments):
            logits[:, 7] += 2.0
            return original(logits, *arguments)

        sampler.apply_temperature = biased
        self._undone.append(lambda: delattr(sampler, "apply_temperature"))

    def _swapped_experts(self):
        order = [1, 0, 2, 3]
        gate = self._layers[0].mlp.gate
        experts = self._layers[0].mlp.experts
        original = experts.router.select_experts

        def select(*arguments, **options):
            weights, ids = original(*arguments, **options)
            return weights, torch.tensor(order, dtype=ids.dtype)[ids.long()]

        gate.weight  # noqa: B018
        experts.router.select_experts = select
        self._undone.append(lambda: delattr(experts.router, "select_experts"))
