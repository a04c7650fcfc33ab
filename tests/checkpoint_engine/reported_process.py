"""Writes which weights of experts a reload misses, by what vLLM's loader reports and by what was written."""

import json

import torch

from verl.checkpoint_engine.engines.vllm.reload import Reload

NAME = "layer.experts.routed_experts.w13_weight"
AS_032, BEFORE_032 = {NAME}, {"layer.experts.w13_weight"}


def missing(loaded, written):
    model = torch.nn.Module()
    layer = model
    for name in NAME.split(".")[:-1]:
        layer.add_module(name, torch.nn.Module())
        layer = layer.get_submodule(name)
    layer.w13_weight = torch.nn.Parameter(torch.zeros(1))
    reload = object.__new__(Reload)
    reload._model, reload._expected, reload._written = model, {NAME}, written
    return reload._not_among(loaded)


def main() -> None:
    cases = {
        "as 0.32 reports it": (AS_032, {NAME}),
        "as 0.31 reports it": (BEFORE_032, {NAME}),
        "as 0.31 reports it, but nothing was written": (BEFORE_032, set()),
        "not reported": (set(), {NAME}),
    }
    print(json.dumps({case: missing(*given) for case, given in cases.items()}))


if __name__ == "__main__":
    main()
