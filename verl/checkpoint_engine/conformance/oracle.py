"""What a model's log-probs are, as transformers computes them, and what they would be if a part had not arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from .distance import Tolerance

Prompts = Sequence[Sequence[int]]
LogProbs = torch.Tensor
"""Of every token of all prompts but their first ones, one after the other: [number of tokens], float32."""
MOST_TOGETHER = 12
"""Tensors that are looked for together, if no single one explains what a server computes."""
HELPS = 0.9
"""The search for them goes on while one more brings the log-probs nearer by this factor."""


@dataclass(frozen=True)
class Part:
    """A tensor of the model, or a slice of one that stacks several."""

    name: str
    index: int | None = None

    def __str__(self) -> str:
        return self.name if self.index is None else f"{self.name}[{self.index}]"


@dataclass(frozen=True)
class Hypothesis:
    """What may have happened to an update, and the log-probs that a server would then have."""

    fault: str
    text: str
    parts: tuple[str, ...]
    log_probs: LogProbs
    or_else: str | None = None


def load_model(directory: Path, dtype: str) -> Any:
    """Transformers' model with the weights rounded to `dtype`, computing in float32. Raises ConfigError."""
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    try:
        sees = type(AutoConfig.from_pretrained(directory)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = auto.from_pretrained(directory, dtype=getattr(torch, dtype), attn_implementation="eager")
    except (OSError, ValueError, KeyError, ImportError) as exc:
        raise ConfigError(f"--model {directory}: transformers cannot load it: {' '.join(str(exc).split())}") from exc
    return model.float().eval().requires_grad_(False)


def vocabulary(directory: Path) -> int:
    from transformers import AutoConfig

    size: int = AutoConfig.from_pretrained(directory).get_text_config().vocab_size
    return size


def longest_context(directory: Path) -> int:
    """The most tokens that the model was made for."""
    from transformers import AutoConfig

    longest: int = AutoConfig.from_pretrained(directory).get_text_config().max_position_embeddings
    return longest


def configured_dtype(directory: Path) -> str:
    from transformers import AutoConfig

    dtype = AutoConfig.from_pretrained(directory).get_text_config().dtype or torch.float32
    return str(dtype).removeprefix("torch.")


def has_experts(directory: Path) -> bool:
    """Whether a router of the model chooses among experts."""
    from transformers import AutoConfig

    fields = AutoConfig.from_pretrained(directory).get_text_config().to_dict()
    return any("expert" in name and isinstance(value, int) and value > 1 for name, value in fields.items())


@torch.inference_mode()
def log_probs(model: Any, prompts: Prompts) -> LogProbs:
    """Log-probs of the tokens of `prompts`, each given those before it. Prompts are one batch, filled up at their ends,
    which nothing before sees."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    scores = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    found = scores.gather(2, ids[:, 1:, None])[..., 0]
    return torch.cat([row[: len(prompt) - 1] for row, prompt in zip(found, prompts, strict=True)])


def parts_of(model: Any) -> list[Part]:
    """The tensors that a checkpoint has; of stacked ones (three dimensions and more, as experts) each slice."""
    found, seen = [], set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or not tensor.is_floating_point():
            continue
        seen.add(id(tensor))
        stacked = tensor.ndim == 3 and "expert" in name
        found += [Part(name, index) for index in range(len(tensor))] if stacked else [Part(name)]
    return found


@dataclass
class Oracle:
    """Versions `old` and `new` of a model. Computes what a server answers that has `new`, `old`, or parts of both."""

    old: Any
    new: Any
    prompts: Prompts
    parts: list[Part] = field(default_factory=list)
    effects: dict[str, LogProbs] = field(default_factory=dict)
    """Part to the log-probs without it: this part of `old`, all others of `new`."""

    def __post_init__(self) -> None:
        self.of_old, self.of_new = log_probs(self.old, self.prompts), log_probs(self.new, self.prompts)
        self._old, self._new = (model.state_dict(keep_vars=True) for model in (self.old, self.new))
        self.parts = self.parts or parts_of(self.new)

    def measure(self) -> None:
        """Compute `effects`: one pass over the prompts for each part."""
        for part in self.parts:
            if str(part) not in self.effects:
                with self._with_old([part]):
                    self.effects[str(part)] = log_probs(self.new, self.prompts)

    def power(self, tolerance: Tolerance) -> dict[str, float]:
        """Part to the distance that its absence makes, in nats."""
        self.measure()
        return {name: tolerance.away(found, self.of_new) for name, found in self.effects.items()}

    @contextmanager
    def _with_old(self, parts: Sequence[Part]) -> Iterator[None]:
        kept = []
        with torch.no_grad():
            for part in parts:
                ours, theirs = self._new[part.name].data, self._old[part.name].data
                if part.index is not None:
                    ours, theirs = ours[part.index], theirs[part.index]
                kept.append((ours, ours.clone()))
                ours.copy_(theirs)
        try:
            yield
        finally:
            for ours, before in kept:
                ours.copy_(before)

    def _likely(self) -> Iterator[Hypothesis]:
        """Nothing arrived, or one tensor did not."""
        self.measure()
        yield Hypothesis("not delivered", "every tensor is that of the previous version", (), self.of_old)
        for name, found in self.effects.items():
            yield Hypothesis(
                "partly loaded", "is that of the previous version", (name,), found, or_else="stale derived state"
            )

    def _others(self) -> Iterator[Hypothesis]:
        """A tied copy is old, one layer is missing, two tensors are exchanged."""
        yield from self._head()
        yield from self._layers()
        yield from self._exchanged()

    def _head(self) -> Iterator[Hypothesis]:
        """A head that is tied to the embedding has no tensor of its own in a checkpoint: its copy is derived."""
        head, embedding = self.new.get_output_embeddings(), self.new.get_input_embeddings()
        if head is None or head.weight is not embedding.weight:
            return
        tied = head.weight
        for module, where in ((head, "head"), (embedding, "embedding")):
            module.weight = torch.nn.Parameter(self.old.get_input_embeddings().weight.data, requires_grad=False)
            try:
                found = log_probs(self.new, self.prompts)
            finally:
                module.weight = tied
            name = next(name for name, tensor in self._new.items() if tensor is tied)
            yield Hypothesis("stale derived state", f"is new, but not its tied copy, the {where}", (name,), found)

    def _layers(self) -> Iterator[Hypothesis]:
        layers: dict[str, list[Part]] = {}
        for part in self.parts:
            words = part.name.split(".")
            for end, word in enumerate(words):
                if word.isdigit():
                    layers.setdefault(".".join(words[: end + 1]), []).append(part)
        for parts in layers.values():
            with self._with_old(parts):
                found = log_probs(self.new, self.prompts)
            yield Hypothesis("partly loaded", "is that of the previous version", tuple(map(str, parts)), found)

    def _exchanged(self) -> Iterator[Hypothesis]:
        """Tensors of one module with the same shape, and the halves of stacked gate and up projections."""
        by_module: dict[tuple[str, torch.Size], list[str]] = {}
        for part in self.parts:
            if part.index is None and part.name.count("."):
                module, _, _ = part.name.rpartition(".")
                parent, _, _ = module.rpartition(".")
                by_module.setdefault((parent, self._new[part.name].shape), []).append(part.name)
        pairs = [
            (first, second)
            for (_, shape), names in by_module.items()
            if len(shape) > 1
            for at, first in enumerate(names)
            for second in names[at + 1 :]
        ]
        for first, second in pairs:
            one, other = self._new[first].data, self._new[second].data
            yield self._edited(
                (first, second), "have each other's values", [(one, other.clone()), (other, one.clone())]
            )
        experts: dict[str, list[Part]] = {}
        for part in self.parts:
            if part.index is not None:
                experts.setdefault(part.name, []).append(part)
        for name, parts in experts.items():
            values = self._new[name].data
            if "gate_up" in name and values.shape[1] % 2 == 0:
                halves = torch.cat(values.chunk(2, dim=1)[::-1], dim=1)
                yield self._edited((name,), "has its halves, gate and up, exchanged", [(values, halves)])
            rolled = values.roll(1, dims=0)
            yield self._edited((name,), "has experts in the places of others", [(values, rolled)])
            if len(parts) > 1 and values.shape[1] == values.shape[2]:
                yield self._edited((name,), "is transposed", [(values, values.transpose(1, 2).clone())])

    def _edited(
        self, names: tuple[str, ...], text: str, edits: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> Hypothesis:
        kept = [(place, place.clone()) for place, _ in edits]
        for place, value in edits:
            place.copy_(value)
        try:
            found = log_probs(self.new, self.prompts)
        finally:
            for place, before in kept:
                place.copy_(before)
        return Hypothesis("wrongly loaded", text, names, found)

    def explain(self, found: LogProbs, tolerance: Tolerance) -> Hypothesis:
        """The first hypothesis that gives `found` within `tolerance`; else that several tensors are missing; else
        "wrongly loaded" without names."""
        for hypotheses in (self._likely(), self._others()):
            tried = [(tolerance.away(found, one.log_probs), one) for one in hypotheses]
            away, nearest = min(tried, key=lambda one: one[0], default=(float("inf"), None))
            if nearest is not None and away <= tolerance.nats:
                return nearest
        return self._several(found, tolerance) or Hypothesis(
            "wrongly loaded", "no version, and no part of the two versions, has these log-probs", (), found
        )

    def _several(self, found: LogProbs, tolerance: Tolerance) -> Hypothesis | None:
        """Tensors of the previous version, added one by one as long as each brings the log-probs nearer."""
        taken: list[Part] = []
        nearest, left = float((self.of_new - found).norm()), list(self.parts)
        while left and len(taken) < MOST_TOGETHER:
            tried: list[tuple[float, float, Part]] = []
            for part in left:
                with self._with_old([*taken, part]):
                    away = log_probs(self.new, self.prompts) - found
                tried.append((float(away.norm()), tolerance.size(away.abs()), part))
            norm, most, part = min(tried, key=lambda one: one[0])
            if norm >= HELPS * nearest:
                return None
            taken, nearest = [*taken, part], norm
            left.remove(part)
            if most <= tolerance.nats:
                names = tuple(map(str, taken))
                return Hypothesis("partly loaded", "are those of the previous version", names, found)
        return None


def write_version(model: Path, directory: Path, amounts: Mapping[str, float], seed: int) -> None:
    """A version of `model`: to every floating-point tensor of its files noise is added, of `amounts[name]` times its
    own standard deviation (or mean magnitude, where it is constant)."""
    import shutil

    from safetensors.torch import load_file, save_file

    from ..parameter_server.checkpoint_directory import checkpoint_files

    directory.mkdir(exist_ok=True)
    for file in model.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin"):
            shutil.copyfile(file, directory / file.name)
    for file in checkpoint_files(model):
        tensors = {
            name: _noisy(tensor, amounts.get(name, amounts[""]), f"{seed} {name}")
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, directory / file.name, metadata={"format": "pt"})


def _noisy(tensor: torch.Tensor, amount: float, seed: str) -> torch.Tensor:
    import zlib

    if not tensor.is_floating_point() or not amount:
        return tensor
    values = tensor.float()
    scale = float(values.std()) if values.numel() > 1 else 0.0
    scale = scale if scale > 1e-6 else float(values.abs().mean()) or 0.02
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(zlib.crc32(seed.encode())))
    return (values + amount * scale * noise).to(tensor.dtype)


def changed_version(
    model: Path, directory: Path, prompts: Prompts, dtype: str, tolerance: Tolerance, tell: Callable[[str], None]
) -> tuple[Oracle, dict[str, float]]:
    """Write a version in which every tensor differs, by more where a smaller change would not show in log-probs.
    Returns the oracle, and the amount for each file's tensor (`write_version`); "" is that of all others."""
    from ..parameter_server.checkpoint_directory import checkpoint_files
    from ..parameter_server.safetensors_files import read_checkpoint

    names = [tensor.name for tensor in read_checkpoint(checkpoint_files(model))]
    amounts: dict[str, float] = {"": CHANGES[0]}
    old = load_model(model, dtype)
    for change in (*CHANGES[1:], None):
        write_version(model, directory, amounts, seed=1)
        oracle = Oracle(old, load_model(directory, dtype), prompts)
        unseen = [name for name, effect in oracle.power(tolerance).items() if effect <= MARGIN * tolerance.nats]
        if not unseen or change is None:
            break
        tell(f"{len(unseen)} of {len(oracle.parts)} tensors are changed by {change:g} standard deviations to be seen")
        amounts |= {name: change for part in unseen for name in _in_files(part, names)}
    return oracle, amounts


CHANGES = (0.5, 4.0, 16.0)
"""Noise in standard deviations: of all tensors, then of those that do not show."""
MARGIN = 2.0
"""A tensor is seen if its absence makes this many tolerances: rounding hides one of them at most."""


def _in_files(part: str, names: Sequence[str]) -> list[str]:
    """The tensors of the files that make a tensor of the model: of the same name, or below the same module."""
    whole, _, _ = part.partition("[")
    if whole in names:
        return [whole]
    words = whole.split(".")
    for end in range(len(words) - 1, 0, -1):
        if found := [name for name in names if name.startswith(".".join(words[:end]) + ".")]:
            return found
    return []
