"""The driver's side of an SGLang replica. Does not import SGLang unless `engine_kwargs.sglang` has to be checked."""

from __future__ import annotations

from verl.utils.config import ConfigError, did_you_mean
from verl.workers.rollout.base import RolloutReplica
from verl.workers.rollout.sglang.environment import TELLS, environment

OWNED_ARGUMENTS = {
    "model_path": "actor_rollout_ref.model.path",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "json_model_override_args": "actor_rollout_ref.model.override_config",
    "device": "trainer.device",
    "dtype": "rollout.dtype",
    "random_seed": "rollout.seed",
    "load_format": "rollout.load_format",
    "tp_size": "rollout.tensor_model_parallel_size",
    "context_length": "rollout.max_model_len",
    "max_running_requests": "rollout.max_num_seqs",
    "max_prefill_tokens": "rollout.max_num_batched_tokens",
    "chunked_prefill_size": "rollout.enable_chunked_prefill",
    "mem_fraction_static": "rollout.gpu_memory_utilization",
    "max_total_tokens": "rollout.cpu_kvcache_gib",
    "disable_cuda_graph": "rollout.enforce_eager",
    "disable_radix_cache": "rollout.enable_prefix_caching",
    "custom_weight_loader": "the checkpoint engine",
    "weight_version": "the checkpoint engine",
    "skip_tokenizer_init": "the agent loops, whose prompts and responses are token ids",
    "enable_memory_saver": "rollout.free_cache_engine",
}
"""Arguments that the replica sets from the configuration, or fixes because its code depends on them."""
ONE_REPLICA = ("dp_size", "pp_size", "nnodes", "tokenizer_worker_num")
"""Arguments that would give a replica more ranks, or more processes, than it is placed on."""


class SGLangReplica(RolloutReplica):
    """One SGLang engine: a scheduler process per tensor-parallel rank, and a detokenizer, behind the server."""

    engine = "verl.workers.rollout.sglang.engine:SGLangEngine"
    can_sleep_on = ("cuda",)
    startup_hints = {"cpu": " (takes about 20 s)"}

    def check_config(self) -> None:
        config = self.config
        if self.device == "cpu" and config.tensor_model_parallel_size > 1:
            raise ConfigError(
                f"rollout.tensor_model_parallel_size={config.tensor_model_parallel_size}: SGLang on cpu has been tried "
                "on one rank only; set it to 1, or rollout.name=vllm"
            )
        arguments = config.engine_kwargs.get("sglang") or {}
        for name in arguments:
            if name in OWNED_ARGUMENTS:
                raise ConfigError(f"rollout.engine_kwargs.sglang.{name} is decided by {OWNED_ARGUMENTS[name]}")
        for name in ONE_REPLICA:
            if arguments.get(name) not in (None, 1):
                raise ConfigError(
                    f"rollout.engine_kwargs.sglang.{name}={arguments[name]}: a replica has the ranks of "
                    "rollout.tensor_model_parallel_size; more of them are replicas (rollout.num_replicas)"
                )
        if arguments:
            from sglang.srt.server_args import ServerArgs

            known = list(ServerArgs.__struct_fields__)
            for name in arguments:
                if name not in known:
                    raise ConfigError(
                        f"SGLang has no argument {name!r} (engine_kwargs.sglang).{did_you_mean(name, known)}"
                    )

    def env_vars(self) -> dict[str, str]:
        env = environment(self.device) | TELLS
        if self.device == "cpu":
            env["OMP_NUM_THREADS"] = "1"
        return env
