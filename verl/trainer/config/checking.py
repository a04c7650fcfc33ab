"""The output of `--check`: the plan of a run and notes on its keys, or all problems with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from verl.checkpoint_engine.registry import COLLECTIVES
from verl.trainer.config.from_verl.translation import Note
from verl.utils.device import resolve_device
from verl.workers.config import PPOConfig

KINDS = (
    ("unknown keys", lambda line: line.startswith("unknown configuration key")),
    ("keys of verl that are not here", lambda line: line.startswith("verl key ")),
    ("values", lambda line: True),
)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The findings of `--check` about a run that has not begun."""

    plan: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """Warnings that the run would log, too."""
    stand_ins: list[str] = field(default_factory=list)
    """Problems that only the built-in stand-in for the user's model or data set has: it is too small."""
    lacking: list[str] = field(default_factory=list)
    """What this machine lacks and the run's machine needs."""


def on_its_device(config: PPOConfig) -> PPOConfig:
    """`config` with a device: the given one, else that of its backend, of its engine, or of this machine."""
    if config.trainer.device is not None:
        return config
    device, rollout = resolve_device(), config.actor_rollout_ref.rollout
    if rollout.enable_rollout_routing_replay and rollout.name == "vllm":
        device = "cuda" if device == "cpu" else device
    wanted = {backend: of for of, backend in COLLECTIVES.items()}.get(config.checkpoint_engine.backend, device)
    return replace(config, trainer=replace(config.trainer, device=wanted if device == "cpu" else device))


def grouped(problems: Sequence[str]) -> str:
    """The problems as text for stderr: grouped by kind, each group with its name and count, each line with `error`."""
    lines: list[str] = []
    rest = [line for problem in problems for line in problem.splitlines()]
    for name, belongs in KINDS:
        of_kind = [line for line in rest if belongs(line)]
        rest = [line for line in rest if line not in of_kind]
        if of_kind:
            lines += [f"{name}: {len(of_kind)}", *(f"error: {line}" for line in of_kind)]
    return "".join(f"{line}\n" for line in lines)


def noted(notes: Sequence[Note]) -> Iterator[str]:
    """A line for each accepted key that lacks its effect; keys that cost memory or time come first."""
    for note in sorted(notes, key=lambda note: not note.costs):
        yield f"{'warning' if note.costs else 'no effect'}: {note}"
