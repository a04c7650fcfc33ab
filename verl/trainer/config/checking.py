"""What `--check` says: the plan of a run, what its keys would have done, or everything that is wrong with them."""

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
    """What was found out about a run that has not begun."""

    plan: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What the run would say, too."""
    stand_ins: list[str] = field(default_factory=list)
    """What a built-in model or data set is too small for. It stands in for the user's own, which decides."""
    lacking: list[str] = field(default_factory=list)
    """What this machine has not, and the one that the run starts on must have."""


def on_its_device(config: PPOConfig) -> PPOConfig:
    """`config` with a device. If the launch names none: that of its backend, the one that its engine needs,
    or that of this machine."""
    if config.trainer.device is not None:
        return config
    device, rollout = resolve_device(), config.actor_rollout_ref.rollout
    if rollout.enable_rollout_routing_replay and rollout.name == "vllm":
        device = "cuda" if device == "cpu" else device
    wanted = {backend: of for of, backend in COLLECTIVES.items()}.get(config.checkpoint_engine.backend, device)
    return replace(config, trainer=replace(config.trainer, device=wanted if device == "cpu" else device))


def grouped(problems: Sequence[str]) -> str:
    """Lines for stderr: each problem begins with `error`, each kind with its name and number."""
    lines: list[str] = []
    rest = [line for problem in problems for line in problem.splitlines()]
    for name, belongs in KINDS:
        of_kind = [line for line in rest if belongs(line)]
        rest = [line for line in rest if line not in of_kind]
        if of_kind:
            lines += [f"{name}: {len(of_kind)}", *(f"error: {line}" for line in of_kind)]
    return "".join(f"{line}\n" for line in lines)


def noted(notes: Sequence[Note]) -> Iterator[str]:
    """A line for each accepted key that has not its effect; those that cost something first."""
    for note in sorted(notes, key=lambda note: not note.costs):
        yield f"{'warning' if note.costs else 'no effect'}: {note}"
