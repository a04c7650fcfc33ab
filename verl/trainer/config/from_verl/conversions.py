"""Converts values of verl's keys to ours where they differ. Used by the table in `keys`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from verl.trainer.config.from_verl.rules import Values
from verl.utils.config import ConfigError
from verl.utils.device import DEVICES, resolve_device
from verl.utils.language_model import patch_pixels
from verl.workers.config.profiler import DEVICES_OF_TOOL

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_FSDP = ("fsdp", "fsdp2")


def one_of(*values: Any) -> Callable[[Any, Values], bool]:
    """Whether the value is one of `values`; True and 1 differ."""
    return lambda value, _: any(
        value == known and isinstance(value, bool) == isinstance(known, bool) for known in values
    )


def is_models_patch(value: Any, at: Values) -> bool:
    """Whether patches of pictures have that many pixels on a side; of a model that is not here nobody can tell."""
    return patch_pixels(str(at(f"{_MODEL}.path"))) in (None, value)


def engine_of(value: Any, _: Values) -> Any:
    """verl's `model_engine` chooses a whole engine's files. `dp` leaves the strategies unchanged."""
    if value in ("dp", "fsdp", "legacy"):
        return None
    if value == "megatron":
        return value
    raise ConfigError(f"model_engine={value} is not here: training engines are fsdp, fsdp2 and megatron")


def fsdp_strategy(value: Any, at: Values) -> Any:
    """The strategy if the actor's engine is FSDP: with another engine the section has no effect."""
    return value if at(f"{_ACTOR}.strategy") in _FSDP else None


def same_family(value: Any, at: Values) -> bool:
    actor = at(f"{_ACTOR}.strategy")
    return value == actor or (value in _FSDP and actor in _FSDP)


def is_actors(name: str) -> Callable[[Any, Values], bool]:
    """Whether the value is null or the actor's value of `name`."""
    return lambda value, at: value is None or value == at(f"{_ACTOR}.megatron.{name}")


def of_same_checkpoint(value: Any, at: Values) -> bool:
    """Whether the reference policy is read from the actor's checkpoint."""
    key = "megatron.dist_checkpointing_path"
    return not value or at(f"actor_rollout_ref.ref.{key}") in (None, "", at(f"{_ACTOR}.{key}"))


def by_ranks(value: Any, at: Values) -> Any:
    """A size per rank from verl's deprecated size, which counts over all ranks."""
    if value is None:
        return None
    return max(1, value // _ranks(at)) if isinstance(value, int) else value


def scheduler(value: Any, _: Values) -> Any:
    if value in ("constant", "cosine", "linear", None):
        return value
    raise ConfigError(f"{value!r} is not possible, only constant, cosine and linear")


def on_lr(section: str) -> Callable[[Any, Values], Any]:
    """An absolute learning rate as a share of the peak."""

    def convert(value: Any, at: Values) -> Any:
        peak = at(f"{section}.lr")
        if value in (None, 0, 0.0):
            return None
        try:
            return float(value) / float(peak)
        except (TypeError, ValueError, ZeroDivisionError) as exc:
            raise ConfigError(f"it is a share of {section}.lr here: set that, too, to a number above 0") from exc

    return convert


def below_lora(value: Any, at: Values) -> Any:
    """The value if there are adapters, else None: it has no effect."""
    return value if at(f"{_MODEL}.lora.rank") or at(f"{_MODEL}.lora_rank") else None


def adapters_alike(value: Any, at: Values) -> bool:
    """Whether no layer with adapters is excluded by name, or there are no adapters."""
    if not (at(f"{_MODEL}.lora.rank") or at(f"{_MODEL}.lora_rank")):
        return True
    targets = at(f"{_MODEL}.lora.target_modules") or at(f"{_MODEL}.target_modules") or "all-linear"
    return value in (None, "", [], "DONT_EXCLUDE") or (value == ".*visual.*" and targets == "all-linear")


def computed_in(value: Any, at: Values) -> bool:
    """Whether this is the dtype in which the layers, and so their adapters, compute."""
    return value in (None, "bfloat16", at(f"{_ACTOR}.megatron.dtype") or "bfloat16")


def at_most_turns(value: Any, at: Values) -> Any:
    """The limit of assistant turns: one more than the limit of user turns, which are the tools' answers."""
    if value is None:
        return None
    present = at(f"{_ROLLOUT}.multi_turn.max_assistant_turns")
    if not isinstance(value, int):
        return value
    return min(value + 1, present) if isinstance(present, int) else value + 1


def scraped(value: Any, at: Values) -> int | None:
    """A port of the driver for Prometheus: the launch's, else 0 for any free one."""
    if not value:
        return None
    present = at("trainer.metrics_port")
    return present if isinstance(present, int) else 0


def rejections(value: Any, at: Values) -> Any:
    """Converts verl's older names: ratio over a token, a sequence, or a sequence's geometric mean.

    Raises ConfigError for two bounds: the older ones bound the inverse ratio. One bound means the same in both.
    """
    older = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
    if not isinstance(value, str) or value not in older:
        return value
    key = "algorithm.rollout_correction.rollout_rs"
    bounds = at(f"{key}_threshold")
    if "_" in str(bounds):
        lower, _, upper = str(bounds).rpartition("_")
        raise ConfigError(
            f"an older release's name, where {bounds} bounds the ratio of trainer to rollout probability. "
            f"*_k1 bounds the inverse ratio: write {key}={older[value]} and {key}_threshold="
            f"{_inverse(upper)}_{_inverse(lower)}"
        )
    return older[value]


def _inverse(bound: str) -> str:
    try:
        return f"{1 / float(bound):.6g}"
    except (ValueError, ZeroDivisionError):
        return f"(1/{bound})"


def policy_loss(value: Any, at: Values) -> Any:
    """The loss that verl computes with `bypass_mode`. Raises ConfigError without `use_rollout_log_probs`."""
    if value != "bypass_mode":
        return value
    if at("actor_rollout_ref.actor.use_rollout_log_probs") is not True:
        raise ConfigError(
            "the loss uses the rollout engine's log-probs as the old ones, as with "
            "algorithm.rollout_correction.bypass_mode=true: set that alone"
        )
    return "vanilla"


def format_of_load(value: Any, _: Values) -> Any:
    """The source of an engine's first weights; `auto` for verl's names of formats that vLLM detects itself."""
    if isinstance(value, str) and value.startswith("dummy"):
        return "dummy"
    return {"safetensors": "auto", "hf": "auto", "megatron": "auto"}.get(value, value)


LOGGER_NAMES = {"file": "jsonl"}


def loggers(value: Any, _: Values) -> Any:
    """A list in quotes, as scripts write it for a shell, is a list."""
    names = [name.strip(" '\"") for name in value.strip("[]").split(",")] if isinstance(value, str) else value
    if not isinstance(names, list):
        return value
    return [LOGGER_NAMES.get(name, name) if isinstance(name, str) else name for name in names]


def profiler_tool(value: Any, at: Values) -> Any:
    """None for a known tool without steps, which traces nothing."""
    known = isinstance(value, str) and value in (*DEVICES_OF_TOOL, "precision_debugger")
    return None if known and not at("global_profiler.steps") else value


def profiled_steps(value: Any, at: Values) -> Any:
    return value if at(f"{_ACTOR}.profiler.enable") or at("global_profiler.tool") is None else None


def profiles(value: Any, at: Values) -> Any:
    """False if nothing is traced: without steps, as in verl, or with a tool for other devices."""
    tool = at("global_profiler.tool")
    nothing = tool is not None and (not at("global_profiler.steps") or not _traces_here(tool, at))
    return False if value is True and nothing else value


def profiles_rollouts(value: Any, at: Values) -> Any:
    """False unless the tool is `torch` and has steps: other tools do not trace rollouts here."""
    traced = at("global_profiler.tool") == "torch" and at("global_profiler.steps")
    return False if value is True and not traced else value


def _traces_here(tool: Any, at: Values) -> bool:
    """What is said explicitly is not judged here."""
    return at("trainer.device") is not None or resolve_device() in DEVICES_OF_TOOL.get(str(tool), DEVICES)


def profiled_ranks(value: Any, at: Values) -> Any:
    return [] if at(f"{_ACTOR}.profiler.all_ranks") is True else value


def dtype_name(value: Any, _: Values) -> Any:
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(value, value)


def dtype_of(value: Any, _: Values) -> Any:
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(value, value)


def kl_name(value: Any, _: Values) -> Any:
    """One name for each estimator, for which verl has two."""
    if not isinstance(value, str):
        return value
    name = value.removesuffix("+")
    return {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}.get(name, name) + value[len(name) :]


def divides_ranks(value: Any, at: Values) -> Any:
    """-1 (all ranks) for a size of at least the number of ranks."""
    return -1 if isinstance(value, int) and value >= _ranks(at) else value


def _ranks(at: Values) -> int:
    """Of the trainer; what is no number is told elsewhere."""
    sizes = (at("trainer.nnodes"), at("trainer.n_gpus_per_node"))
    return math.prod(size for size in sizes if isinstance(size, int))


def shared_by(fsdp: str) -> Callable[[Any, Values], Any]:
    """Ranks per sequence, set outside of the section `fsdp`; as in verl, 1 leaves that section's value."""

    def convert(value: Any, at: Values) -> Any:
        present = at(f"{fsdp}.ulysses_sequence_parallel_size")
        if present in (None, 1, value):
            return value
        if value in (None, 1):
            return None
        raise ConfigError(f"{fsdp}.ulysses_sequence_parallel_size={present} is the same key: set one of them")

    return convert


def critic_strategy(value: Any, _: Values) -> Any:
    """`fsdp2` for `fsdp`: both shard a critic in the same way."""
    return "fsdp2" if value == "fsdp" else value


def off_as_minus_1(value: Any, _: Values) -> Any:
    return -1 if value is False else value
