"""From values of verl's keys to values of ours, where they are not the same. Used by the table in `keys`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from verl.trainer.config.from_verl.rules import Values
from verl.utils.config import ConfigError
from verl.utils.device import DEVICES, resolve_device
from verl.workers.config.profiler import DEVICES_OF_TOOL

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_FSDP = ("fsdp", "fsdp2")


def one_of(*values: Any) -> Callable[[Any, Values], bool]:
    """True and 1 are two values."""
    return lambda value, _: any(
        value == known and isinstance(value, bool) == isinstance(known, bool) for known in values
    )


def engine_of(value: Any, _: Values) -> Any:
    """`model_engine` chooses the files of a whole engine: `dp` leaves what the strategies say."""
    if value in ("dp", "fsdp", "legacy"):
        return None
    if value == "megatron":
        return value
    raise ConfigError(f"model_engine={value} is not here: training engines are fsdp, fsdp2 and megatron")


def fsdp_strategy(value: Any, at: Values) -> Any:
    """With another engine the section means nothing."""
    return value if at(f"{_ACTOR}.strategy") in _FSDP else None


def same_family(value: Any, at: Values) -> bool:
    actor = at(f"{_ACTOR}.strategy")
    return value == actor or (value in _FSDP and actor in _FSDP)


def is_actors(name: str) -> Callable[[Any, Values], bool]:
    """Whether it is null or what the actor has as `name`."""
    return lambda value, at: value is None or value == at(f"{_ACTOR}.megatron.{name}")


def of_same_checkpoint(value: Any, at: Values) -> bool:
    """Whether the reference policy is read from where the actor is."""
    key = "megatron.dist_checkpointing_path"
    return not value or at(f"actor_rollout_ref.ref.{key}") in (None, "", at(f"{_ACTOR}.{key}"))


def by_ranks(value: Any, at: Values) -> Any:
    """verl's deprecated sizes count over all ranks."""
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
    """Without adapters it means nothing."""
    return value if at(f"{_MODEL}.lora.rank") or at(f"{_MODEL}.lora_rank") else None


def adapters_alike(value: Any, at: Values) -> bool:
    """Whether no layer is excluded, as far as names can tell, or there are no adapters."""
    return value in (None, "", [], "DONT_EXCLUDE") or not (at(f"{_MODEL}.lora.rank") or at(f"{_MODEL}.lora_rank"))


def computed_in(value: Any, at: Values) -> bool:
    """Whether adapters have this dtype in the computation, as the layers have beside which they are."""
    return value in (None, "bfloat16", at(f"{_ACTOR}.megatron.dtype") or "bfloat16")


def at_most_turns(value: Any, at: Values) -> Any:
    """After so many turns of the user, which are the tools' answers, one more of the assistant follows."""
    if value is None:
        return None
    present = at(f"{_ROLLOUT}.multi_turn.max_assistant_turns")
    if not isinstance(value, int):
        return value
    return min(value + 1, present) if isinstance(present, int) else value + 1


def scraped(value: Any, at: Values) -> int | None:
    """A port of the driver for Prometheus: that of the launch, else any that is free."""
    if not value:
        return None
    present = at("trainer.metrics_port")
    return present if isinstance(present, int) else 0


def rejections(value: Any, at: Values) -> Any:
    """verl's older names, those of a ratio over a token, a sequence, or its geometric mean.

    Raises ConfigError for two bounds: theirs were those of the inverse ratio. One is the same either way.
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
    """verl's name of the loss that its `bypass_mode` puts in the place of any other. Raises ConfigError without."""
    if value != "bypass_mode":
        return value
    if at("actor_rollout_ref.actor.use_rollout_log_probs") is not True:
        raise ConfigError(
            "the loss uses the rollout engine's log-probs as the old ones, as with "
            "algorithm.rollout_correction.bypass_mode=true: set that alone"
        )
    return "vanilla"


def format_of_load(value: Any, _: Values) -> Any:
    """Where an engine's first weights come from: verl's names for files that vLLM finds itself."""
    if isinstance(value, str) and value.startswith("dummy"):
        return "dummy"
    return {"safetensors": "auto", "hf": "auto", "megatron": "auto"}.get(value, value)


LOGGER_NAMES = {"file": "jsonl"}


def loggers(value: Any, _: Values) -> Any:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list):
        return value
    return [LOGGER_NAMES.get(name, name) if isinstance(name, str) else name for name in names]


def profiler_tool(value: Any, at: Values) -> Any:
    """Nothing is traced without steps, whatever the tool."""
    known = isinstance(value, str) and value in (*DEVICES_OF_TOOL, "precision_debugger")
    return None if known and not at("global_profiler.steps") else value


def profiled_steps(value: Any, at: Values) -> Any:
    return value if at(f"{_ACTOR}.profiler.enable") or at("global_profiler.tool") is None else None


def profiles(value: Any, at: Values) -> Any:
    """verl has a tool and no steps, and traces nothing; so it is for a tool of devices that are not here."""
    tool = at("global_profiler.tool")
    nothing = tool is not None and (not at("global_profiler.steps") or not _traces_here(tool, at))
    return False if value is True and nothing else value


def profiles_rollouts(value: Any, at: Values) -> Any:
    """With other tools verl traces them by ways that are not here."""
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
    """verl has two names for each estimator."""
    if not isinstance(value, str):
        return value
    name = value.removesuffix("+")
    return {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}.get(name, name) + value[len(name) :]


def divides_ranks(value: Any, at: Values) -> Any:
    """As many as there are, or more, is all of them."""
    return -1 if isinstance(value, int) and value >= _ranks(at) else value


def _ranks(at: Values) -> int:
    """Of the trainer; what is no number is told elsewhere."""
    sizes = (at("trainer.nnodes"), at("trainer.n_gpus_per_node"))
    return math.prod(size for size in sizes if isinstance(size, int))


def shared_by(fsdp: str) -> Callable[[Any, Values], Any]:
    """How many ranks share a sequence, said outside of the section `fsdp`: verl lets 1 stand for what that says."""

    def convert(value: Any, at: Values) -> Any:
        present = at(f"{fsdp}.ulysses_sequence_parallel_size")
        if present in (None, 1, value):
            return value
        if value in (None, 1):
            return None
        raise ConfigError(f"{fsdp}.ulysses_sequence_parallel_size={present} is the same key: set one of them")

    return convert


def critic_strategy(value: Any, _: Values) -> Any:
    """FSDP1 and FSDP2 cut a model in the same way."""
    return "fsdp2" if value == "fsdp" else value


def off_as_minus_1(value: Any, _: Values) -> Any:
    return -1 if value is False else value
