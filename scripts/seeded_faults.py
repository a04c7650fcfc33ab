"""Faults in a real vLLM, which `conformance_seeds.py` switches on by name. It is a plugin of vLLM's processes.

A fault has effect while the file at $CONFORMANCE_SEED has its name. Those of weights are changes of what a loader
takes: from the tensors of the version before it and of the new one, as the checkpoint names them.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts import seeded_steps

State = dict[str, torch.Tensor]
Change = Callable[[State, State], State]
FILE = "CONFORMANCE_SEED"
L0, L1 = "model.layers.0", "model.layers.1"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class Seed:
    """A fault, and how a run has to name it."""

    fault: str
    tensors: tuple[str, ...] = ()
    """In transformers' model. Empty: any."""
    change: Change | None = None
    """Of a loader; None: it is not in a loader."""
    step: str = ""
    """Of `--level full`, that shows it; empty: any update does."""


def keep(*names: str) -> Change:
    """The loader takes these from the version before."""
    return lambda old, new: new | {name: tensor for name, tensor in old.items() if name.startswith(names)}


def swap(first: str, second: str) -> Change:
    return lambda _, new: new | {first: new[second], second: new[first]}


def edit(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda _, new: new | {name: change(new[name].clone())}


def missing(name: str, *or_below: str) -> Seed:
    return Seed(fault="partly loaded", tensors=(name,), change=keep(name, *or_below))


def wrong(change: Change, *tensors: str) -> Seed:
    return Seed(fault="wrongly loaded", tensors=tensors, change=change)


def of(layer: str, part: str) -> str:
    return f"{layer}.{part}.weight"


def one_element(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[0] += 8 * tensor.abs().max()
    return tensor


def first_half_twice(tensor: torch.Tensor) -> torch.Tensor:
    half = len(tensor) // 2
    return torch.cat([tensor[:half], tensor[:half]])


Q1, K1, V1, O1 = (of(L1, f"self_attn.{part}_proj") for part in "qkvo")
GATE0, UP0, DOWN0 = (of(L0, f"mlp.{part}_proj") for part in ("gate", "up", "down"))
DENSE: dict[str, Seed] = {
    "nothing is loaded": Seed(fault="not delivered", change=lambda old, _: old),
    "old queries": missing(Q1),
    "old keys": missing(K1),
    "old values": missing(V1),
    "old output projection": missing(O1),
    "old norm of queries": missing(of(L0, "self_attn.q_norm")),
    "old norm of keys": missing(of(L0, "self_attn.k_norm")),
    "old gate": missing(GATE0),
    "old up": missing(UP0),
    "old down": missing(DOWN0),
    "old norm before attention": missing(of(L1, "input_layernorm")),
    "old norm before the MLP": missing(of(L1, "post_attention_layernorm")),
    "old last norm": missing("model.norm.weight"),
    "old embedding": missing(EMBEDDING),
    "old head": missing(HEAD),
    "an old layer": Seed(fault="partly loaded", tensors=(Q1, K1, V1, O1), change=keep(f"{L1}.")),
    "two old tensors": Seed(fault="partly loaded", tensors=(Q1, HEAD), change=keep(Q1, HEAD)),
    "q and k exchanged": wrong(swap(Q1, K1), Q1, K1),
    "k and v exchanged": wrong(swap(K1, V1), K1, V1),
    "gate and up exchanged": wrong(swap(GATE0, UP0), GATE0, UP0),
    "layers exchanged": wrong(swap(O1, of(L0, "self_attn.o_proj"))),
    "head and embedding exchanged": wrong(swap(HEAD, EMBEDDING)),
    "a matrix transposed": wrong(edit(O1, lambda tensor: tensor.T.contiguous())),
    "zeros": wrong(edit(K1, torch.zeros_like)),
    "rounded to eight bits": wrong(edit(HEAD, lambda tensor: tensor.to(torch.float8_e4m3fn).float())),
    "an old scale": wrong(edit(DOWN0, lambda tensor: tensor * 1.25)),
    "half of a matrix twice": wrong(edit(UP0, first_half_twice)),
    "rows rolled": wrong(edit(V1, lambda tensor: tensor.roll(1, 0))),
    "one element": wrong(edit(DOWN0, one_element)),
    "negated": wrong(edit(O1, torch.neg)),
    "the old prefix cache": Seed(fault="stale cache"),
    "the label of another version": Seed(fault="wrong label"),
    "the label before": Seed(fault="wrong label"),
    "no pause": Seed(fault="mixed versions"),
}
ADAPTERS: dict[str, Seed] = {
    "the old adapter": Seed(fault="not delivered"),
    "old queries of the adapter": Seed(fault="partly loaded", tensors=(Q1,)),
    "old down of the adapter": Seed(fault="partly loaded", tensors=(DOWN0,)),
    "an adapter without its last factor": Seed(fault="wrong adapter"),
    "an adapter twice as strong": Seed(fault="wrongly loaded"),
    "the cache of the old adapter": Seed(fault="stale cache"),
}
STEPS: dict[str, Seed] = {
    "a copy is updated after sleep": Seed(fault="not delivered", step="after sleep 1"),
    "the head is lost in sleep": Seed(fault="wrongly loaded", step="after sleep 2"),
    "the cache of clients that left": Seed(fault="stale cache", step="clients leave"),
    "abort does not pause": Seed(fault="mixed versions", step="pause mode abort"),
    "the cache of what is kept": Seed(fault="stale cache", step="pause mode keep"),
    "the adapter is lost": Seed(fault="wrong adapter", step="adapter on top"),
    "no pause for the adapter": Seed(fault="mixed versions", step="adapter on top"),
}
"""Each shows in one step of `--level full`, and not in updates without it."""
SEEDS = DENSE | ADAPTERS | STEPS


def now() -> str:
    """The name of the fault that has effect; empty: none."""
    return Path(os.environ[FILE]).read_text()


def register() -> None:
    """Called by vLLM in each of its processes."""
    if FILE not in os.environ:
        return
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM

    _loads(Qwen3ForCausalLM)
    for seed in ("the old prefix cache", "the cache of the old adapter"):
        _replace(Scheduler, "reset_prefix_cache", seed, lambda *_, **__: True)
    _replace(AsyncLLM, "pause_generation", "no pause", _nothing)
    _replace(AsyncLLM, "update_weight_version", "the label before", _nothing)
    _labels(AsyncLLM)
    _adapters(LRUCacheWorkerLoRAManager)
    _replace(kv_cache_utils, "_gen_lora_extra_hash_keys", "the cache of the old adapter", lambda _: [])
    seeded_steps.register(now)


async def _nothing(*_: object, **__: object) -> None: ...


def _replace(owner: Any, name: str, seed: str, other: Callable[..., Any]) -> None:
    own = getattr(owner, name)

    @functools.wraps(own)
    def replaced(*arguments: Any, **named: Any) -> Any:
        return (other if now() == seed else own)(*arguments, **named)

    setattr(owner, name, replaced)


def _labels(owner: Any) -> None:
    own = owner.update_weight_version

    @functools.wraps(own)
    async def update(self: Any, new_version: str) -> None:
        await own(self, f"{new_version}0" if now() == "the label of another version" else new_version)

    owner.update_weight_version = update


def _loads(owner: Any) -> None:
    own, before = owner.load_weights, State()

    @functools.wraps(own)
    def load(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        new = {name: tensor.clone() for name, tensor in weights}
        seed = SEEDS.get(now())
        taken = seed.change(dict(before), dict(new)) if seed is not None and seed.change is not None else new
        taken = seeded_steps.loaded(now(), before, taken)
        before.update(taken)
        return own(self, iter(taken.items()))

    owner.load_weights = load


def _adapters(owner: Any) -> None:
    own, before = owner._load_adapter, dict[str, dict[str, Any]]()

    @functools.wraps(own)
    def load(self: Any, request: Any) -> Any:
        new, seed = own(self, request), now()
        old = copy.deepcopy(before.get(request.lora_name, new.loras))
        if seed == "the old adapter":
            new.loras = old
        elif seed == "an adapter without its last factor":
            for lora in new.loras.values():
                lora.lora_b.zero_()
        elif seed == "an adapter twice as strong":
            for lora in new.loras.values():
                lora.lora_b.mul_(2)
        elif seed in OLD_MODULES:
            new.loras |= {name: lora for name, lora in old.items() if name.endswith(OLD_MODULES[seed])}
        seeded_steps.with_adapter(new.loras)
        before[request.lora_name] = copy.deepcopy(new.loras)  # vLLM packs what it has, in place
        return new

    owner._load_adapter = load


OLD_MODULES = {
    "old queries of the adapter": f"{L1}.self_attn.q_proj",
    "old down of the adapter": f"{L0}.mlp.down_proj",
}
