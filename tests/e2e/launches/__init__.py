"""Argument lists of verl's own launch scripts, one argument a line, and how they become runs of seconds.

What is replaced: sizes, the model, the data and other files of the user, the directory for output, loggers whose
package is not here, and NCCL, which a CPU has not. All else is as the script says it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

REPLACED = {
    # sizes
    "data.train_batch_size": "4",
    "data.max_prompt_length": "64",
    "data.max_response_length": "8",
    "*.ppo_mini_batch_size": "4",
    "*_micro_batch_size_per_gpu": "2",
    "actor_rollout_ref.rollout.n": "2",
    "actor_rollout_ref.rollout.val_kwargs.n": "1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "1",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "512",
    "*.pipeline_model_parallel_size": "1",
    "*.megatron.tensor_model_parallel_size": "2",
    "*.overlong_buffer_cfg.len": "4",
    "*.max_resp_len": "8",
    "actor_rollout_ref.model.lora.rank": "8",
    "actor_rollout_ref.model.lora.alpha": "16",
    "rollout.total_rollout_steps": "8",
    "*nnodes": "1",
    "trainer.n_gpus_per_node": "1",
    "rollout.n_gpus_per_node": "1",
    "reward.reward_model.rollout.prompt_length": "128",
    "reward.reward_model.rollout.response_length": "64",
    "reward.num_workers": "1",
    # what a CPU has not, and this machine
    "trainer.logger": "[console,jsonl]",
    "*.checkpoint_engine.backend": "gloo",
}
"""Keys that are replaced where they are given, and by what."""
ADDED = {
    "trainer.total_training_steps": "2",
    "data.val_max_samples": "2",
    "actor_rollout_ref.rollout.cpu_kvcache_gib": "0.1",
}
"""Sizes that no script states."""


def argv_of(kind: str, own: Mapping[str, str]) -> list[str]:
    """The arguments of a launch, made small. `own` are files and sizes of the user: they win over `REPLACED`."""
    lines = Path(__file__).with_name(f"{kind}.args").read_text().splitlines()
    values = {**ADDED, **own}
    given = [_replaced(line, values) for line in lines if not line.startswith("#")]
    keys = {_key(argument) for argument in given}
    return [*given, *(f"{key}={value}" for key, value in values.items() if key not in keys)]


def _replaced(argument: str, own: Mapping[str, str]) -> str:
    found = next(_values(_key(argument), own), None)
    return argument if found is None else f"{argument.partition('=')[0]}={found}"


def _values(key: str, own: Mapping[str, str]) -> Iterator[str]:
    if key in own:
        yield own[key]
    yield from (value for pattern, value in REPLACED.items() if fnmatchcase(key, pattern))


def _key(argument: str) -> str:
    return argument.partition("=")[0].lstrip("+")
