"""Faults of SGLang's loaders, put into its ranks by an order: an empty tensor's name, for a custom weight loader."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from verl.checkpoint_engine.parameter_server.http_server import HttpServer

LOADER = f"{__name__}.load"
Weights = Iterable[tuple[str, torch.Tensor]]


def set_fault(server: HttpServer, fault: str) -> None:
    """Have the server's ranks load with `fault` from now on; rightly if it is empty."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump([(fault, torch.empty(0))])
    order = base64.b64encode(buffer.getvalue()).decode()
    body = {"serialized_named_tensors": [order], "load_format": LOADER, "flush_cache": False}
    server.call("POST", "/begin_weight_update", {})
    server.call("POST", "/update_weights_from_tensor", body)
    server.call("POST", "/end_weight_update", {})


def load(model: Any, named_tensors: Any) -> None:
    """In a rank."""
    ((fault, _),) = named_tensors
    vars(model).pop("load_weights", None)
    if fault:
        whole = model.load_weights
        object.__setattr__(model, "load_weights", lambda weights: whole(_wrong(fault, weights)))


def _wrong(fault: str, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    what, _, which = fault.partition(" ")
    for name, tensor in weights:
        if what == "loads":
            continue
        if what == "skips" and name.startswith(which):
            continue
        if what == "exchanges":
            one, other = which.split(" with ")
            name = name.replace(one, "?").replace(other, one).replace("?", other)
        if what == "zeroes" and name.startswith(which):
            tensor = torch.zeros_like(tensor)
        if what == "rounds" and name.startswith(which):
            tensor = tensor.to(torch.float8_e4m3fn).to(tensor.dtype)
        yield name, tensor
