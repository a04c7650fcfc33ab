"""The servers that can serve a reward model: their modules and arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.utils.config import ConfigError
from verl.utils.model import load_hf_config
from verl.workers.config import HFModelConfig
from verl.workers.config.reward_model import RewardRolloutConfig

Options = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """The model that an engine serves, and its options."""

    name: str
    model: str
    """Local directory."""
    names: tuple[str, ...]
    """The names of the model in requests."""
    scores: bool
    """Whether the model has a head for scores; otherwise it generates text."""
    trust_remote_code: bool
    config: RewardRolloutConfig
    device: str
    can_sleep: bool
    log: Path
    """The log file, on the engine's machine."""
    environment: dict[str, str] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        """The arguments of the engine's server, except its address. Raises ConfigError."""
        return [word for name, value in options_of(self).items() for word in _option(name, value)]


@dataclass(frozen=True, kw_only=True)
class ServingEngine:
    """A kind of server."""

    module: str
    """Run as `python -m`, with `options`, and `--host` and `--port`."""
    options: Callable[[ServerSpec], Options]
    environment_on_cpu: dict[str, str]


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    values = value if isinstance(value, list) else [value]
    return [f"--{name}", *map(str, values)] if value is not None else []


def options_of(spec: ServerSpec) -> Options:
    """The options by long name without leading dashes; the user's come last."""
    chosen = dict(spec.config.engine_kwargs)
    own = {name: chosen.pop(name, None) or {} for name in ENGINES}[spec.config.name]
    given = {name.replace("_", "-"): value for name, value in (chosen | own).items()}
    return ENGINES[spec.config.name].options(spec) | given


def _of_vllm(spec: ServerSpec) -> Options:
    config = spec.config
    options: Options = {
        "model": spec.model,
        "served-model-name": list(spec.names),
        "tensor-parallel-size": config.tensor_model_parallel_size,
        "dtype": config.dtype,
        "max-model-len": config.longest,
        "max-num-seqs": config.max_num_seqs,
        "max-num-batched-tokens": max(config.max_num_batched_tokens, config.longest, config.max_num_seqs),
        "enforce-eager": config.enforce_eager or spec.device == "cpu",
        "trust-remote-code": spec.trust_remote_code,
        "enable-sleep-mode": spec.can_sleep,
    }
    if spec.device == "cpu":
        options["kv-cache-memory-bytes"] = int(config.cpu_kvcache_gib * 2**30)
    else:
        options["gpu-memory-utilization"] = config.gpu_memory_utilization
    if spec.scores:
        options["runner"] = "pooling"
    return options


def _of_sglang(spec: ServerSpec) -> Options:
    """SGLang answers to any name of the model, and tells the one that it is given."""
    config = spec.config
    chunk = max(config.max_num_batched_tokens, config.longest)
    options: Options = {
        "model-path": spec.model,
        "served-model-name": spec.names[0],
        "tp-size": config.tensor_model_parallel_size,
        "device": spec.device,
        "dtype": config.dtype,
        "context-length": config.longest,
        "max-running-requests": config.max_num_seqs,
        "max-prefill-tokens": chunk,
        "chunked-prefill-size": chunk,
        "disable-cuda-graph": config.enforce_eager or spec.device == "cpu",
        "trust-remote-code": spec.trust_remote_code,
        "log-level": "warning",
    }
    if spec.device != "cpu":
        return options | {"mem-fraction-static": config.gpu_memory_utilization}
    return options | {
        "max-total-tokens": _room(spec),
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "disable-overlap-schedule": True,
        "sleep-on-idle": True,
    }


def _room(spec: ServerSpec) -> int:
    """Tokens in the KV cache on cpu. Raises ConfigError if that is no whole sequence."""
    from verl.workers.rollout.sglang.room import tokens_in  # torch: only for this

    model = HFModelConfig(path=spec.model, trust_remote_code=spec.trust_remote_code)
    tokens = tokens_in(spec.config.cpu_kvcache_gib, load_hf_config(model).get_text_config(), spec.config.dtype)
    if tokens < spec.config.longest:
        raise ConfigError(
            f"reward_model.rollout.cpu_kvcache_gib={spec.config.cpu_kvcache_gib} holds the keys and values of {tokens} "
            f"tokens, fewer than one request has ({spec.config.longest})"
        )
    return tokens


ENGINES = {
    "vllm": ServingEngine(
        # The command `vllm` asks for the version of a package of that name, which builds for CPU do not have.
        module="vllm.entrypoints.openai.api_server",
        options=_of_vllm,
        environment_on_cpu={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    ),
    "sglang": ServingEngine(
        module="sglang.launch_server",
        options=_of_sglang,
        environment_on_cpu={"SGLANG_USE_CPU_ENGINE": "1", "PYTHONWARNINGS": "ignore::UserWarning"},
    ),
}
"""By `reward_model.rollout.name`."""
