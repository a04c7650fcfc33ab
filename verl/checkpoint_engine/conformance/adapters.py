"""Versions of a LoRA adapter, and a run that certifies a server of vLLM with them: `certify --server --route lora`.

The base model stays. A and B are two adapters of it, and after each update the base alone is compared, too.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from .distance import Tolerance
from .oracle import CHANGES, MARGIN, LogProbs, Oracle, Part, Prompts, load_model, log_probs
from .probes import Probed, ProbedVLLM
from .routes import AdapterRoute
from .sequence import NUM_TOKENS, Beside, Flown, Run
from .verdicts import Finding, Step

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 8, 16
"""vLLM takes ranks up to its --max-lora-rank, 16 by default."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Two adapters of one base model."""

    base: Any
    """The model without an adapter."""
    oracle: Oracle
    directories: tuple[Path, Path]


@dataclass(kw_only=True)
class AdapterRun(Run):
    """`server` answers with the adapter, `base` without one."""

    base: Probed
    model: Any
    """Of the base."""

    def __post_init__(self) -> None:
        self.of_base = log_probs(self.model, self.oracle.prompts)

    def cold(self) -> Step:
        """Look at the base. Raises ConfigError if it is not the model's."""
        step = Step(name="base")
        found = self.probed(self.base)
        step.tokens, step.deviation = len(found), self.tolerance.away(found, self.of_base)
        if not step.deviation <= self.tolerance.nats:
            raise ConfigError(f"the server does not compute with the model: it is {step.deviation:.3g} nats away")
        return self._kept(step)

    def not_cold_a(self, step: Step) -> str:
        return "no adapter is loaded yet"

    def bring_back(self) -> bool:
        """Unload the adapter."""
        route = self.route
        assert isinstance(route, AdapterRoute)
        if self._last is not None:
            with suppress(Exception):
                self._last[1].result(self.timeout_s)
        return route.unload()

    def remains(self, model: Path) -> str:
        route = self.route
        assert isinstance(route, AdapterRoute)
        return f"the server may still have the adapter {route.name}: unload it"

    def _ask_beside(self, step: Step) -> None:
        super()._ask_beside(step)
        # Not its prompt's log-probs: beside others with an adapter they end vLLM (vllm-project/vllm#16668).
        answer = self.base.continued(self._unknown(self.oracle.prompts[0]), NUM_TOKENS)
        if not self.is_of(answer, self.model):
            text = "a request without an adapter, while others with one ran, is not answered by the base model alone"
            step.findings.append(Finding(fault="wrong adapter", text=text, prompt=answer.prompt))

    def _fill_cache(self) -> Sequence[int]:
        return super()._fill_cache() if self._last is not None else ()  # before the first update there is no adapter

    def _compare(self, step: Step, target: int, label: str, before: dict[str, str], flown: list[Flown]) -> None:
        super()._compare(step, target, label, before, flown)
        away = self.tolerance.away(self.probed(self.base), self.of_base)
        if not away <= self.tolerance.nats:
            text = f"requests without an adapter are {away:.3g} nats away from the base model, which no update changed"
            step.findings.append(Finding(fault="wrong adapter", text=text, prompt=self.oracle.prompts[0]))

    def _named(self, found: LogProbs, target: int, before: dict[str, str]) -> Finding:
        if self.tolerance.allows(found, self.of_base):
            text = "requests for the adapter are computed with the base model alone"
            return Finding(fault="wrong adapter", text=text, prompt=self.oracle.prompts[0])
        return super()._named(found, target, before)


def adapter_versions(
    model: Path, scratch: Path, prompts: Prompts, dtype: str, tolerance: Tolerance, tell: Callable[[str], None]
) -> Adapters:
    """Write two random adapters of every projection in attention and MLPs, in PEFT's form, with larger changes where
    smaller ones would not show. The oracle is PEFT's merged model. Raises ConfigError."""
    base = load_model(model, dtype)
    targets = _targets(base)
    if not targets:
        raise ConfigError(f"{model} has no {', '.join(TARGETS)}: --route lora has no adapter for it")
    parts = [Part(f"{name}.weight") for name in targets]
    amounts = dict.fromkeys(targets, CHANGES[0])
    directories = scratch / "A", scratch / "B"
    for change in (*CHANGES[1:], None):
        old, new = (_written(base, directory, amounts, dtype) for directory in directories)
        oracle = Oracle(old, new, prompts, parts)
        unseen = [name for name, effect in oracle.power(tolerance).items() if effect <= MARGIN * tolerance.nats]
        if not unseen or change is None:
            break
        tell(f"{len(unseen)} of {len(parts)} tensors are changed by {change:g} standard deviations to be seen")
        amounts |= {name.removesuffix(".weight"): change for name in unseen}
    return Adapters(base=base, oracle=oracle, directories=directories)


def on_top(run: Run, scratch: Path, dtype: str, route: AdapterRoute) -> OnTop:
    """Load an adapter for both versions of a run. Raises ConfigError if there is none for them, or for the server."""
    targets = _targets(run.oracle.old)
    if not targets:
        raise ConfigError(f"the model has no {', '.join(TARGETS)}")
    directory = scratch / "adapter"
    on_old = _written(run.oracle.old, directory, dict.fromkeys(targets, CHANGES[0]), dtype)
    from peft import PeftModel

    wrapped: Any = PeftModel.from_pretrained(copy.deepcopy(run.oracle.new), str(directory))
    on_new = wrapped.merge_and_unload().eval().requires_grad_(False)
    route.push(directory, 0)
    return OnTop(route, (on_old, on_new))


class OnTop(Beside):
    """An adapter that the server has while its base is updated, with requests for it in flight."""

    def __init__(self, route: AdapterRoute, models: tuple[Any, Any]) -> None:
        """`models`: the adapter merged into each version."""
        self._route, self._models = route, models

    def before(self, run: Run, step: Step) -> None:
        self._server = ProbedVLLM(run.server.url, timeout_s=run.timeout_s, name=self._route.name)
        for _ in range(2):
            self._server.continued(run.long_prompt, 1)
        with_it = log_probs(self._models[1 if run.may_have_b else 0], run.oracle.prompts)
        if run.tolerance.allows(run.probed(), with_it):
            text = "requests without an adapter are computed with the one that is loaded"
            step.findings.append(Finding(fault="wrong adapter", text=text, prompt=run.oracle.prompts[0]))

    @contextmanager
    def during(self, run: Run) -> Iterator[None]:
        self._flown = list[Flown]()
        with run.requests(self._flown, self._server):
            yield

    def after(self, run: Run, step: Step, target: int) -> None:
        prompts = run.oracle.prompts
        found, model = run.probed(self._server), self._models[target]
        step.tokens += len(found)
        if not (away := run.tolerance.away(found, log_probs(model, prompts))) <= run.tolerance.nats:
            fault, text = "wrong adapter", f"requests for the adapter are {away:.3g} nats from it on the new base"
            if run.tolerance.allows(found, log_probs(self._models[1 - target], prompts)):
                fault, text = "stale derived state", "the adapter is computed on the previous base"
            elif run.tolerance.allows(found, run.oracle.of_new if target else run.oracle.of_old):
                text = "requests for the adapter are computed with the new base alone"
            step.findings.append(Finding(fault=fault, text=text, prompt=prompts[0]))
        elif not run.is_of(self._server.continued(run.long_prompt, NUM_TOKENS), model):
            text = "a prompt that the adapter answered before the update goes on differently"
            step.findings.append(Finding(fault="stale cache", text=text, prompt=run.long_prompt))
        run.look_at(step, self._flown, self._models[1 - target], model, None, " with the adapter")
        self._route.unload()


def _targets(model: Any) -> list[str]:
    """The projections in attention and MLPs."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith(TARGETS) and "vis" not in name
    ]


def _written(base: Any, directory: Path, amounts: Mapping[str, float], dtype: str) -> Any:
    """Write an adapter whose product has `amounts` times the standard deviation of each weight; return the model with
    it merged."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as exc:
        raise ConfigError("--route lora makes its adapters with peft: pip install peft") from exc
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(amounts))
    model: Any = get_peft_model(copy.deepcopy(base), config)
    for name, amount in amounts.items():
        layer = model.base_model.model.get_submodule(name)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{directory.name} {name}".encode()))
        inwards, outwards = layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data
        size = amount * float(layer.base_layer.weight.std()) * RANK**0.5 / ALPHA
        for weight, scale in ((inwards, 1.0), (outwards, size)):
            drawn = scale * torch.randn(weight.shape, generator=generator)
            weight.copy_(drawn.to(getattr(torch, dtype)))
    model.save_pretrained(str(directory))
    return model.merge_and_unload().eval().requires_grad_(False)
