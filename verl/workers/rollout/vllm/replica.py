"""The driver's side of a vLLM replica. Does not import vLLM unless `engine_kwargs.vllm` has to be checked."""

from __future__ import annotations

from verl import envs
from verl.utils.config import ConfigError, did_you_mean
from verl.utils.model import expert_count, load_hf_config
from verl.workers.rollout.base import RolloutReplica
from verl.workers.rollout.vllm.adapter import LARGEST_RANK

# Set by us from keys of the configuration, or fixed because the rest relies on them.
OWNED_ARGUMENTS = {
    "model": "actor_rollout_ref.model.path",
    "dtype": "rollout.dtype",
    "quantization": "rollout.quantization",
    "quantization_config": "rollout.quantization",
    "seed": "rollout.seed",
    "load_format": "rollout.load_format",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "data_parallel_size": "rollout.data_parallel_size and rollout.expert_parallel_size",
    "data_parallel_size_local": "rollout.data_parallel_size and rollout.expert_parallel_size",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enforce_eager": "rollout.enforce_eager",
    "enable_prefix_caching": "rollout.enable_prefix_caching",
    "enable_chunked_prefill": "rollout.enable_chunked_prefill",
    "weight_transfer_config": "the checkpoint engine",
    "logprobs_mode": "the trainer, which compares log-probs",
    "generation_config": "rollout's sampling keys",
    "enable_sleep_mode": "rollout.free_cache_engine",
    "enable_lora": "actor_rollout_ref.model.lora.merge",
    **dict.fromkeys(
        ("mm_processor_cache_gb", "mm_device_do_normalize", "mm_processor_kwargs"),
        "the trainer, whose patches vLLM is given",
    ),
    "enable_return_routed_experts": "rollout.enable_rollout_routing_replay",
    "max_loras": "actor_rollout_ref.model.lora.merge",
    "max_lora_rank": "actor_rollout_ref.model.lora_rank",
}
EXACT_MODELS = ("qwen2", "qwen3", "llama", "qwen3_moe")
ONE_REPLICA = ("pipeline_parallel_size", "prefill_context_parallel_size")
"""Arguments that would give a replica more ranks than it is placed on."""


class VLLMReplica(RolloutReplica):
    """One `AsyncLLM` behind the server: an engine-core process per data-parallel rank, with a worker process per
    tensor-parallel rank each."""

    engine = "verl.workers.rollout.vllm.engine:VLLMEngine"
    can_sleep_on = ("cuda", "npu")
    loads_adapters = True
    deals_experts = True
    tells_experts_on = ("cuda",)
    quantizes_on = ("cpu", "cuda")
    startup_hints = {"cpu": " (takes up to 20 s)", "cuda": " (takes a minute or two if it compiles)"}

    def check_config(self) -> None:
        if self.config.exact:
            self._check_exact()
        if self.config.data_ranks > 1:
            self._check_data_ranks()
        if self.model.sends_adapters:
            self._check_adapters()
        arguments = self.config.engine_kwargs.get("vllm") or {}
        if not arguments:
            return
        if self.config.expert_parallel_size > 1 and arguments.get("enable_expert_parallel") is False:
            raise ConfigError(
                "rollout.engine_kwargs.vllm.enable_expert_parallel=false contradicts "
                f"rollout.expert_parallel_size={self.config.expert_parallel_size}: delete one of them"
            )
        for name in arguments:
            if name in OWNED_ARGUMENTS:
                raise ConfigError(f"rollout.engine_kwargs.vllm.{name} is decided by {OWNED_ARGUMENTS[name]}")
        for name in ONE_REPLICA:
            if arguments.get(name) not in (None, 1):
                raise ConfigError(
                    f"rollout.engine_kwargs.vllm.{name}={arguments[name]}: a replica has the ranks of "
                    "rollout.tensor_model_parallel_size, and of rollout.data_parallel_size where experts are dealt out "
                    "over both (rollout.expert_parallel_size)"
                )
        import dataclasses

        from vllm.engine.arg_utils import AsyncEngineArgs

        known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
        for name in arguments:
            if name not in known:
                raise ConfigError(f"vLLM has no argument {name!r} (engine_kwargs.vllm).{did_you_mean(name, known)}")

    def _check_data_ranks(self) -> None:
        """What has not been tried with several engine cores in one replica."""
        key = f"actor_rollout_ref.rollout.expert_parallel_size={self.config.expert_parallel_size}"
        own = f"{self.config.tensor_model_parallel_size}, which makes data-parallel ranks replicas of their own"
        if self.model.sends_adapters:
            raise ConfigError(
                f"{key} over data-parallel ranks has not been tried with adapters: set it to {own}, or "
                "actor_rollout_ref.model.lora.merge=true"
            )
        if self.config.enable_rollout_routing_replay:
            raise ConfigError(
                f"{key} over data-parallel ranks has not been tried with rollout.enable_rollout_routing_replay: set it "
                f"to {own}"
            )

    def _check_exact(self) -> None:
        from verl.workers.hf.exact import layer_that_differs

        key, hf_config = "actor_rollout_ref.rollout.exact=true", load_hf_config(self.model)
        if hf_config.model_type not in EXACT_MODELS:
            raise ConfigError(
                f"{key} has been tried with {', '.join(EXACT_MODELS)}, not with {hf_config.model_type}: leave it out"
            )
        if sliding := set(getattr(hf_config, "layer_types", None) or ()) - {"full_attention"}:
            raise ConfigError(f"{key} attends to all tokens before, and the model has {', '.join(sorted(sliding))}")
        if found := layer_that_differs(hf_config):
            raise ConfigError(f"{key}: on this processor {found}: leave it out")

    def _check_adapters(self) -> None:
        merged = "set actor_rollout_ref.model.lora.merge=true"
        if self.model.lora_rank > LARGEST_RANK:
            raise ConfigError(
                f"actor_rollout_ref.model.lora_rank={self.model.lora_rank}: vLLM loads adapters of ranks up to "
                f"{LARGEST_RANK}; {merged}"
            )
        # With LoRA enabled, vLLM 0.32 computes experts in a Triton kernel, whether they have adapters or not.
        hf_config = load_hf_config(self.model)
        if self.device == "cpu" and expert_count(hf_config):
            raise ConfigError(
                f"actor_rollout_ref.model.lora.merge=false: vLLM on cpu cannot load adapters into "
                f"{hf_config.model_type}, a mixture of experts; {merged}"
            )

    def env_vars(self) -> dict[str, str]:
        env = {
            # On cpu, vLLM warns ten times per start about what cannot be otherwise: no Triton, eager mode, tcmalloc.
            "VLLM_LOGGING_LEVEL": envs.vllm_logging_level("ERROR" if self.device == "cpu" else "WARNING"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the server has threads; vLLM would choose it, with a warning
        }
        if self.device == "cpu":
            env["OMP_NUM_THREADS"] = "1"  # of the server and the engine core; vLLM sets it for its workers
            # Eager mode still compiles a small function to C++ on the first request. Without, nobody needs a compiler,
            # and the first batch of the built-in model takes 0.8 s instead of 3.3 s, the next ones as long as before.
            env["TORCHDYNAMO_DISABLE"] = "1"
        return env
