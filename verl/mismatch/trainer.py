"""The trainer's side: transformers' model of a directory, as the FSDP engine computes it, with hooks.

It is run in three ways. `run` is what a trainer computes. With `given`, each module gets what the engine's module got,
so that a difference belongs to that module alone. After `widen` the same model computes in the next wider dtype: the
trainer's distance from that is what rounding does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from verl.mismatch.places import ATTENTION, LOGITS, entered, modules_of, states_in, states_out, tokens_first
from verl.utils.config import ConfigError
from verl.utils.language_model import is_wrapper, sees
from verl.utils.model import EXACT
from verl.workers.hf import packing  # noqa: F401 - registers the attention of exact mode
from verl.workers.hf.attention import attention_implementation
from verl.workers.hf.exact import agree
from verl.workers.hf.fit import require_whole_model

PROBE = "verl_mismatch"
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
Given = Callable[[str, torch.Tensor], torch.Tensor | None]
"""From a place and what the trainer's module would get, what it is to get instead."""


def dtype_of(directory: Path) -> str:
    """The dtype of a model's files. Raises ConfigError for a directory without a configuration."""
    try:
        dtype = AutoConfig.from_pretrained(directory).get_text_config().dtype
    except (OSError, ValueError, KeyError) as exc:
        raise ConfigError(f"--model {directory}: {' '.join(str(exc).split())}") from exc
    return str(dtype or torch.float32).removeprefix("torch.")


def _loaded(directory: Path, dtype: str, exact: bool) -> Any:
    """Raises ConfigError for a directory that transformers cannot load, and for one that is more than a causal LM."""
    auto: Any = AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(directory)
        _require_text(config, directory)
        require_whole_model(directory, "--model", lambda: config, remote=False)
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        chosen = EXACT if exact else attention_implementation(config) or "sdpa"
        _register(chosen)
        return auto.from_pretrained(
            directory, dtype=getattr(torch, dtype), attn_implementation=f"{PROBE}_{chosen}"
        ).eval()
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as exc:
        raise ConfigError(f"--model {directory}: transformers cannot load it: {' '.join(str(exc).split())}") from exc


def _require_text(config: Any, directory: Path) -> None:
    if sees(config) or is_wrapper(config):
        raise ConfigError(
            f"--model {directory}: a {config.model_type} is more than a language model, which is compared"
        )


class TrainersModel:
    """One model. Places are `verl.mismatch.places`, values [tokens, width] on the CPU."""

    def __init__(self, directory: Path, dtype: str, *, exact: bool = False) -> None:
        """Raises ConfigError for a directory that transformers cannot load."""
        self._model = _loaded(directory, dtype, exact)
        if exact:
            agree(self._model)
        # In this process vLLM may decorate the class, where it has no model of its own and takes that of transformers.
        self._model.base_model.do_not_compile = True
        try:
            self._modules = modules_of(self._model)
        except LookupError as exc:
            raise ConfigError(f"--model {directory}: {exc}") from exc
        self._head = self._model.get_output_embeddings()
        self.dtype: torch.dtype = self._model.dtype
        self.options: dict[str, dict[str, Any]] = {}
        """By the path of an attention module, the numbers that its kernel got, like `scaling`."""
        self._found: dict[str, torch.Tensor] = {}
        self._given: Given | None = None
        self._tokens = 0
        """Of the run; 0 outside of one: modules may be called by themselves."""
        for name, module in self._modules.items():
            module.register_forward_pre_hook(functools.partial(self._enter, name), with_kwargs=True)
            module.register_forward_hook(functools.partial(self._leave, name))
            module.mismatch = functools.partial(self._attend, name)  # type: ignore[assignment]
        if self._head is not None:
            self._head.register_forward_pre_hook(functools.partial(self._enter, LOGITS), with_kwargs=True)

    @property
    def names(self) -> list[str]:
        return list(self._modules)

    @property
    def config(self) -> Any:
        return self._model.config.get_text_config()

    @property
    def head_dim(self) -> int:
        return int(getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads)

    @property
    def architecture(self) -> str:
        return type(self._model).__name__

    @property
    def top_k(self) -> dict[str, int]:
        """By the name of a router, how many experts it chooses."""
        routers = {name: each for name, each in self._modules.items() if hasattr(each, "weight")}
        found = {name: getattr(each, "top_k", None) for name, each in routers.items()}
        return {name: top_k for name, top_k in found.items() if isinstance(top_k, int)}

    @property
    def head(self) -> nn.Module | None:
        return self._head  # type: ignore[no-any-return]

    def module(self, name: str) -> nn.Module:
        return self._modules[name]

    def widen(self) -> None:
        self._model.to(WIDER[self.dtype])
        self.dtype = WIDER[self.dtype]
        if self.dtype == torch.float64 and hasattr(self._model, "set_experts_implementation"):
            self._model.set_experts_implementation("eager")  # torch's grouped products take no float64

    @torch.no_grad()
    def run(self, tokens: list[int], given: Given | None = None) -> dict[str, torch.Tensor]:
        """Values by place in the order in which they are computed, and `>place` for what a module got."""
        self._found, self._given, self._tokens = {}, given, len(tokens)
        logits = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        self._found[LOGITS] = logits[0]
        found, self._found, self._given, self._tokens = self._found, {}, None, 0
        return found

    def _keep(self, name: str, states: torch.Tensor) -> None:
        rows = tokens_first(states.detach(), self._tokens)
        self._found[name] = rows.reshape(self._tokens, -1).clone()

    def _replaced(self, name: str, states: torch.Tensor) -> torch.Tensor:
        rows = tokens_first(states, self._tokens)
        instead = self._given(name, rows.reshape(self._tokens, -1)) if self._given is not None else None
        if instead is None:
            return states
        whole = instead.to(states.dtype).reshape(rows.shape)
        return whole if rows is states else whole.transpose(1, 2)

    def _enter(self, name: str, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        states = states_in(arguments, options)
        if not states or not self._tokens:
            return None
        self._keep(f">{name}", states[0])
        if (also := entered(name)) is not None:
            self._keep(also, states[0])
        instead = self._replaced(f">{name}", states[0])
        changed = tuple(instead if each is states[0] else each for each in arguments)
        return changed, {key: instead if each is states[0] else each for key, each in options.items()}

    def _leave(self, name: str, module: nn.Module, arguments: tuple[Any, ...], returned: Any) -> None:
        states = states_out(returned)
        if states and self._tokens:
            self._keep(name, states[0])

    def _attend(
        self, place: str, attention: Callable[..., Any], module: Any, states: tuple[torch.Tensor, ...], options: Any
    ) -> Any:
        self.options[place] = {key: each for key, each in options.items() if isinstance(each, (int, float))}
        replaced = []
        for name, each in zip(ATTENTION[:3], states, strict=True):
            flat = each.transpose(1, 2).flatten(2)
            self._keep(f"{place}.{name}", flat)
            instead = self._replaced(f"{place}.{name}", flat)
            replaced.append(instead.reshape(*flat.shape[:2], each.shape[1], each.shape[3]).transpose(1, 2))
        returned = attention(module, *replaced, **options)
        self._keep(f"{place}.{ATTENTION[3]}", returned[0].flatten(2))
        return returned


def _register(implementation: str) -> None:
    """Make `PROBE_implementation` known to transformers: the same attention, which shows what it gets and returns."""

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        if implementation == "eager":
            attention = sys.modules[type(module).__module__].eager_attention_forward
        else:
            attention = ALL_ATTENTION_FUNCTIONS[implementation]
        options["attention_mask"] = attention_mask
        return module.mismatch(attention, module, (query, key, value), options)

    ALL_ATTENTION_FUNCTIONS.register(f"{PROBE}_{implementation}", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(f"{PROBE}_{implementation}", ALL_MASK_ATTENTION_FUNCTIONS[implementation])


def picks(engine: Mapping[str, torch.Tensor], trainer: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The engine's values at the trainer's places: of a pair of states the one, or the sum, that is what `trainer` has.

    Engines give layers and norms what is to be added and what it is to be added to; which of both a place means is
    decided for all layers together. Left out is what has another shape.
    """
    kinds: dict[str, list[str]] = {}
    for name in trainer:
        if name in engine and engine[name].shape == trainer[name].shape:
            kinds.setdefault(kind_of(name), []).append(name)
    found = {}
    for names in kinds.values():
        pairs = [name for name in names if f"{name}+" in engine]
        alone = {name: engine[name] for name in names}
        together = alone | {name: engine[name] + engine[f"{name}+"] for name in pairs}
        apart = [_distance(way, trainer, pairs) for way in (alone, together)]
        found.update(alone if apart[0] < apart[1] else together)
    return {name: found[name] for name in trainer if name in found}


def kind_of(name: str) -> str:
    """`name` without the number of its layer."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def _distance(way: Mapping[str, torch.Tensor], trainer: Mapping[str, torch.Tensor], names: list[str]) -> float:
    def apart(name: str) -> float:
        expected = trainer[name].float()
        return float((way[name].float() - expected).norm() / expected.norm().clamp_min(1e-30))

    return min(map(apart, names), default=0.0)
