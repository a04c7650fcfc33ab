"""What one client trains: an adapter, its gradients and its Adam state. All is called on the base's thread."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from verl.tenants.base import Base, Shape
from verl.tenants.checkpoints import Snapshot, Version
from verl.tenants.losses import TARGETS, loss_of
from verl.tenants.refused import Refused
from verl.tenants.wire import Batch, written_batch


class Tenant:
    """An adapter in training. Gradients add up until the next step, as in a plain loop."""

    def __init__(self, base: Base, shape: Shape, seed: int) -> None:
        self.shape = shape
        self._base = base
        self._name = base.add(shape, seed)
        self._parameters = base.parameters(self._name)
        self._config = base.config(self._name)
        self._has_gradients = False
        self._incomplete: str | None = None
        """Why gradients are not whole: a step with them would not be the one that was asked for."""
        self._reset_optimizer()

    def _reset_optimizer(self) -> None:
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=0.0)
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._has_gradients, self._incomplete = False, None

    def spoil(self, why: str) -> None:
        """Have the next step refused: a batch of it is missing."""
        self._incomplete = self._incomplete or why

    def compute(self, batch: Batch) -> bytes:
        """Log-probs of the targets and the sum of losses; adds gradients unless `batch.forward_only`.

        `batch` is checked. Raises Refused for a loss that is not finite.
        """
        logprobs, total = [], 0.0
        try:
            with self._base.using(self._name) as model, torch.set_grad_enabled(not batch.forward_only):
                for index, datum in enumerate(batch.data):
                    found = self._base.logprobs(model, datum.tokens, datum.inputs[TARGETS])
                    loss = loss_of(batch.loss, found, datum, batch.options)
                    _check_finite(f"the loss of data[{index}]", loss.item())
                    if not batch.forward_only:
                        torch.autograd.backward(loss)
                        self._has_gradients = True
                    logprobs.append(found.detach().numpy().astype(np.float32))
                    total += loss.item()
        except BaseException as exc:
            if not batch.forward_only:
                self.spoil(f"forward_backward (seq_id {batch.seq_id}) failed: {exc}")
            raise
        return written_batch(logprobs, {"loss:sum": total})

    def step(self, adam: Mapping[str, float]) -> dict[str, float]:
        """One step of AdamW with `adam`, the protocol's AdamParams; returns metrics.

        Raises Refused without gradients, or with ones that are not whole or not finite; they are dropped then.
        """
        if self._incomplete or not self._has_gradients:
            why = self._incomplete or "no forward_backward came before it"
            self._drop_gradients()
            raise Refused(f"optim_step is not done: {why}")
        limit = adam["grad_clip_norm"] if adam["grad_clip_norm"] > 0 else math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), limit))
        try:
            _check_finite("the norm of the gradients", norm)
        except Refused:
            self._drop_gradients()
            raise
        self._optimizer.param_groups[0].update(
            lr=adam["learning_rate"],
            betas=(adam["beta1"], adam["beta2"]),
            eps=adam["eps"],
            weight_decay=adam["weight_decay"],
        )
        self._optimizer.step()
        self._drop_gradients()
        return {"grad_norm": norm}

    def snapshot(self, *, optimizer: bool) -> Snapshot:
        """A copy of it as it is now."""
        return Snapshot(
            shape=self.shape,
            config=self._config,
            tensors={name: parameter.detach().clone().contiguous() for name, parameter in self._parameters.items()},
            optimizer=self._optimizer_state() if optimizer else None,
        )

    def _optimizer_state(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{key}": value.detach().clone().contiguous()
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }

    def load(self, version: Version, *, optimizer: bool) -> None:
        """Go on from a version, with its Adam state or a new one. Raises Refused for an adapter of another shape."""
        if version.shape != self.shape:
            raise Refused(f"{version.path} is of {version.shape}, and this adapter of {self.shape}")
        tensors, state = version.tensors(), version.optimizer() if optimizer else {}
        self._base.fill(self._name, tensors)
        self._reset_optimizer()
        for name, parameter in self._parameters.items():
            keys = [key for key in state if key.startswith(f"{name}.")]
            if keys:
                self._optimizer.state[parameter] = {key.removeprefix(f"{name}."): state[key] for key in keys}

    def close(self) -> None:
        self._base.remove(self._name)


def _check_finite(what: str, value: float) -> None:
    if not math.isfinite(value):
        raise Refused(f"{what} is {value}; the gradients are dropped")
