"""Checks whether the chosen tool can trace what is configured."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from verl.workers.config import PPOConfig


def profiler(config: PPOConfig) -> Iterator[str]:
    from verl.utils.device import resolve_device
    from verl.workers.config.profiler import DEVICES_OF_TOOL

    rollout = config.actor_rollout_ref.rollout
    if rollout.profiler.enable and rollout.name != "vllm":
        yield f"actor_rollout_ref.rollout.profiler.enable=true traces vllm, not rollout.name={rollout.name}"
    if rollout.profiler.enable and config.trainer.placement != "colocated":
        yield (
            "actor_rollout_ref.rollout.profiler.enable=true traces the generation of one step, but engines with "
            f"trainer.placement={config.trainer.placement} generate continuously: set it to false"
        )
    chosen, ranks, where = config.global_profiler, config.actor_rollout_ref.actor.profiler, "actor_rollout_ref.actor"
    if not ranks.enable and not chosen.steps:
        return
    if not ranks.enable:
        yield f"global_profiler.steps={chosen.steps} needs {where}.profiler.enable=true and global_profiler.tool"
        return
    if not (ranks.all_ranks or ranks.ranks):
        yield f"{where}.profiler.enable=true needs {where}.profiler.all_ranks=true, or ranks in {where}.profiler.ranks"
    if strangers := [rank for rank in ranks.ranks if not 0 <= rank < config.trainer.world_size]:
        yield f"{where}.profiler.ranks={ranks.ranks}: no rank {strangers[0]} among {config.trainer.world_size}"
    if chosen.tool is None or not chosen.steps:
        yield f"{where}.profiler.enable=true needs global_profiler.tool=torch and global_profiler.steps, like [2]"
        return
    last = config.trainer.total_training_steps
    if last is not None and max(chosen.steps) > last:
        yield f"global_profiler.steps={chosen.steps}: the run has {last} steps (trainer.total_training_steps)"
    known = DEVICES_OF_TOOL[chosen.tool]
    if (device := resolve_device(config.trainer.device)) not in known:
        yield f"global_profiler.tool={chosen.tool} traces {' and '.join(known)}, not trainer.device={device}"
    elif chosen.tool == "nsys" and device == resolve_device() and shutil.which("nsys") is None:
        yield "global_profiler.tool=nsys needs NVIDIA's program nsys (Nsight Systems) in the PATH"
