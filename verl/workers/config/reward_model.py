"""The sections of a reward model: its files, its machines, the engine that serves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.utils.config import Section, option


@dataclass(frozen=True, kw_only=True)
class ServedModelConfig(Section):
    """The model that scores responses, or that a reward function asks about them."""

    path: str | None = option(
        None,
        "Hugging Face directory; with a head that gives a score (...ForSequenceClassification) it scores by itself, "
        "else custom_reward_function.path calls it",
    )
    trust_remote_code: bool = option(False, "allow code from the model directory")
    external_lib: str | None = option(None, "not here: vLLM loads the model", choices=(None,))


@dataclass(frozen=True, kw_only=True)
class RewardRolloutConfig(Section):
    """The engines that serve the reward model."""

    name: str = option(
        "vllm", "inference engine; sglang: of models that write, not of those with a head", choices=("vllm", "sglang")
    )
    tensor_model_parallel_size: int = option(1, "ranks of one engine (verl: 2)", least=1)
    dtype: str = option("bfloat16", "dtype of weights and computation", choices=("float32", "bfloat16", "float16"))
    prompt_length: int = option(2048, "tokens of a prompt for the reward model", least=1)
    response_length: int = option(2048, "tokens of its answer, or of the response that it scores", least=1)
    max_model_len: int | None = option(None, "tokens of a request; null: prompt_length + response_length", least=1)
    max_num_seqs: int = option(1024, "sequences computed at once", least=1)
    max_num_batched_tokens: int = option(8192, "tokens computed at once", least=1)
    gpu_memory_utilization: float = option(0.5, "share of a device's memory for one engine", above=0, most=1)
    cpu_kvcache_gib: float = option(0.5, "memory of the KV cache on cpu", above=0)
    enforce_eager: bool = option(True, "no CUDA graphs")
    free_cache_engine: bool = option(True, "on the trainer's devices: sleep while nothing is scored")
    engine_kwargs: dict[str, Any] = option(
        {},
        "options of the engine's server, such as enable_prefix_caching; below vllm or sglang, of that one alone",
    )

    @property
    def longest(self) -> int:
        return self.max_model_len or self.prompt_length + self.response_length
