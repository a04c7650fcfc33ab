"""Build a transformers model whose buffers have their values and whose parameters have no memory."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.checkpoint_engine.errors import PlanError
from verl.compat.transformers import keep_parameters_as_they_are

logger = logging.getLogger(__name__)

UNTOUCHED = -7_654_321
"""The mark of untouched values in integer buffers; NaN in others."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """In this block, new modules have parameters on the meta device, and buffers with their constructors' values.

    A module built entirely on the meta device would lose its buffers, and computing them again may initialise
    parameters, too. One parameter at a time has memory, which is never written. For one thread.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            attributes = {key: value for key, value in param.__dict__.items() if not key.startswith("__")}
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            param.__dict__.update(attributes)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@torch.no_grad()
def require_buffers(model: nn.Module, reference: PreTrainedModel, loaded: Collection[str]) -> None:
    """Compare the buffers of `model` with those that transformers computes for `reference`, but for `loaded` ones.

    `reference` is the same model, as transformers builds it for `from_pretrained`: all of it on the meta device. Its
    buffers get memory and its values here; its parameters stay where they are.

    Raises PlanError naming the buffers that differ.
    """
    for module in reference.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            missing = float("nan") if buffer.is_floating_point() else UNTOUCHED
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype).fill_(missing))
    keep_parameters_as_they_are(reference)
    initializer: Any = reference
    initializer.initialize_weights()
    expected = dict(reference.named_buffers())
    wrong = []
    for name, buffer in model.named_buffers():
        found, own = expected.get(_plain(name)), buffer.detach().cpu()
        if found is None or _plain(name) in loaded or _is_untouched(found):
            continue
        if found.dtype != own.dtype or not torch.equal(found, own):
            wrong.append(_plain(name))
    if wrong:
        raise PlanError(
            f"buffers of {type(reference).__name__} are not what transformers computes from its config: "
            f"{', '.join(sorted(wrong))}"
        )


def _is_untouched(buffer: torch.Tensor) -> bool:
    """transformers leaves it as it is; only a constructor gives it values."""
    if buffer.is_floating_point():
        return bool(buffer.isnan().any())
    return bool((buffer == UNTOUCHED).any()) or buffer.dtype in (torch.bool, torch.uint8, torch.int8)


def _plain(name: str) -> str:
    """Without what wraps modules."""
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name
