"""The `actor_rollout_ref.rollout` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.utils.config import Section, option, section


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Section):
    """Sampling during validation."""

    top_k: int = option(-1, "keep only the k likeliest tokens; -1: all", least=-1)
    top_p: float = option(1.0, "keep the smallest set of tokens with this probability mass", above=0, most=1)
    temperature: float = option(0.0, "softmax temperature; 0: greedy", least=0)
    n: int = option(1, "responses per prompt", least=1)
    do_sample: bool = option(False, "false: greedy")


@dataclass(frozen=True, kw_only=True)
class MultiTurnConfig(Section):
    """Tool calls and several assistant turns."""

    enable: bool = option(
        False, "use the tool-calling agent loop instead of single_turn_agent as agent.default_agent_loop"
    )
    max_assistant_turns: int | None = option(
        None, "most assistant messages of a sample; null: as many as there is room for", least=1
    )
    max_parallel_calls: int = option(1, "tool calls taken from one assistant message", least=1)
    ignore_calls_in_thinking: bool = option(
        True,
        "tool calls inside of the model's reasoning are not executed, as in <think>...</think>, closed or not, opened "
        "by the prompt or not; the marks are those of its chat template or vocabulary; false: executed, as in verl",
    )
    max_tool_response_length: int = option(256, "characters kept of one tool response", least=1)
    tool_response_truncate_side: str = option(
        "middle", "where a longer tool response loses characters", choices=("left", "middle", "right")
    )
    tool_timeout_s: float = option(
        60.0, "deadline for a tool call, which then answers with an error, and for a call of an interaction", above=0
    )
    tool_config_path: str | None = option(None, "YAML file that lists the tools")
    interaction_config_path: str | None = option(
        None, "YAML file that lists the interactions, which answer messages that call no tool"
    )
    format: str = option(
        "hermes",
        "how tool calls are written in the model's text: hermes, gpt-oss, a name of vLLM's --tool-call-parser such as "
        "qwen3_coder, or one registered with ToolParser.register in model.external_lib",
    )


@dataclass(frozen=True, kw_only=True)
class RolloutProfilerConfig(Section):
    """Traces of the rollout engines in the steps of `global_profiler`."""

    enable: bool = option(
        False, "trace generation in hybrid mode, with global_profiler.tool=torch and vllm (verl: as the actor's)"
    )
    save_path: str | None = option(None, "null: that of the trainer ranks' traces")


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Section):
    """Agent-loop workers."""

    num_workers: int = option(1, "Ray actors that run agent loops (verl: 8)", least=1)
    default_agent_loop: str = option("single_turn_agent", "for samples that name none in the column agent_name")
    agent_loop_config_path: str | None = option(None, "YAML file with agent loops of your own")
    agent_loop_manager_class: str = option(
        "verl.experimental.agent_loop.manager:AgentLoopManager", "module:Class that runs the loops"
    )
    max_concurrency: int = option(1024, "samples in flight per worker", least=1)
    partial_rollout: bool = option(
        True, "continue a response that a weight update aborted, on the new weights; false: return it as aborted"
    )
    num_cpus: float = option(0.1, "Ray CPUs of one worker", least=0)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Section):
    """Generation: the engine, its resources and its sampling."""

    name: str = option("vllm", "rollout engine registered with RolloutReplicaRegistry")
    mode: str = option("async", "requests are served one by one", choices=("async",))
    n: int = option(
        8, "responses per prompt; null: 8 with a built-in model and built-in data, else verl's 1", least=1, follows=True
    )
    temperature: float = option(1.0, "softmax temperature; log-probs are computed at it, too", least=0)
    top_k: int = option(-1, "keep only the k likeliest tokens; -1: all", least=-1)
    top_p: float = option(1.0, "keep the smallest set of tokens with this probability mass", above=0, most=1)
    do_sample: bool = option(True, "false: greedy")
    seed: int = option(0, "seed of the engine", least=0, below=2**32)
    full_determinism: bool = option(False, "follows trainer.full_determinism: every request has a seed of its own")
    prompt_length: int | None = option(None, "tokens; null: data.max_prompt_length", least=1)
    response_length: int | None = option(None, "tokens; null: data.max_response_length", least=1)
    dtype: str = option("bfloat16", "dtype of the engine's weights", choices=("bfloat16", "float16", "float32"))
    exact: bool = option(
        False,
        "the engine computes with the trainer's own operators, and both give tokens the same bits (vllm on cpu, fsdp "
        "and fsdp2, in bfloat16); false: each has the fastest it knows",
    )
    quantization: str | None = option(
        None,
        "fp8: the engine quantizes every version as it loads it, linear layers and experts in blocks of 128 x 128, but "
        "not routers (vllm); null: it computes in dtype",
        choices=(None, "fp8"),
    )
    gpu_memory_utilization: float = option(
        0.5, "share of device memory for weights and KV cache; on cpu: ignored", above=0, most=1
    )
    cpu_kvcache_gib: float = option(1.0, "KV cache per replica on cpu, in GiB", above=0)
    enforce_eager: bool = option(False, "never compile; on cpu: always eager")
    free_cache_engine: bool = option(True, "free weights and KV cache while the trainer works, where the engine can")
    tensor_model_parallel_size: int = option(1, "ranks that share every layer (verl: 2)", least=1)
    data_parallel_size: int = option(
        1,
        "with expert_parallel_size above tensor_model_parallel_size: as many times the ranks in one replica, which "
        "share its requests; otherwise those are replicas of their own",
        least=1,
    )
    expert_parallel_size: int = option(
        1,
        "ranks over which experts are dealt out: tensor_model_parallel_size, or that times data_parallel_size; 1: "
        "every rank has a part of each expert (vllm)",
        least=1,
    )
    num_replicas: int | None = option(
        None, "replicas of the engine; null: as many as the ranks allow, on cpu one per rollout node", least=1
    )
    nnodes: int = option(
        1, "machines of the rollout engines with trainer.placement=separate; each has an arena", least=1
    )
    n_gpus_per_node: int = option(8, "accelerators of each of them", least=1)
    max_num_batched_tokens: int = option(8192, "tokens per engine step", least=1)
    max_model_len: int | None = option(None, "longest sequence; null: prompt_length + response_length", least=1)
    max_num_seqs: int = option(256, "sequences per engine step", least=1)
    enable_chunked_prefill: bool = option(True, "split long prompts over engine steps")
    enable_prefix_caching: bool = option(True, "reuse the KV cache of shared prefixes; reset when weights change")
    kv_across_versions: str = option(
        "clear",
        "what new weights leave of the KV cache (vllm): clear: nothing; salt: a conversation, and its group, find the "
        "prefixes that they began with, new ones do not; keep: requests in flight go on with theirs, too "
        "(checkpoint_engine.pause_mode=keep)",
        choices=("clear", "salt", "keep"),
    )
    keep_tokens: str = option(
        "auto",
        "in the asynchronous modes, keep the samples that no checkpoint has yet in files of the output directory, for "
        "a run that is resumed (auto: up to a tenth of the free disk and of the free memory of the driver's host); in "
        "fully asynchronous runs also in agent loops (512 MiB each) until the trainer has them",
        choices=("auto", "off"),
    )
    load_format: str = option(
        "dummy", "where the engine's first weights come from; the first sync replaces them", choices=("dummy", "auto")
    )
    calculate_log_probs: bool = option(
        True, "return the engine's log-probs and compare them with the trainer's (verl: false)"
    )
    enable_rollout_routing_replay: bool = option(
        False, "return the experts of every token, for actor.megatron.router_replay.mode=R3 (vllm on cuda, hf)"
    )
    ignore_eos: bool = option(False, "generate up to response_length")
    num_cpus: float = option(0.2, "Ray CPUs of one replica on cpu", least=0)
    startup_timeout_s: float = option(300.0, "deadline for an engine to come up", above=0)
    generate_timeout_s: float = option(600.0, "deadline for one response", above=0)
    control_timeout_s: float = option(
        300.0, "deadline for one control call to an engine: pause, load weights, resume, sleep, wake up", above=0
    )
    max_restarts: int = option(
        2,
        "how often one batch is generated again after engines or workers died and were restarted, before the run ends",
        least=0,
    )
    engine_kwargs: dict[str, Any] = option({}, "passed to the engine: engine_kwargs.vllm.<argument>")
    val_kwargs: SamplingConfig = section(SamplingConfig, "sampling during validation")
    log_prob_micro_batch_size_per_gpu: int | None = option(
        None, "sequences per forward pass when the actor recomputes log-probs", least=1
    )
    log_prob_use_dynamic_bsz: bool = option(
        True, "pack micro-batches up to log_prob_max_token_len_per_gpu tokens; null: as the actor", follows=True
    )
    log_prob_max_token_len_per_gpu: int = option(
        16384, "token budget of one micro-batch and rank; null: the actor's", least=1, follows=True
    )
    multi_turn: MultiTurnConfig = section(MultiTurnConfig)
    agent: AgentConfig = section(AgentConfig)
    profiler: RolloutProfilerConfig = section(RolloutProfilerConfig)
    checkpoint_engine: dict[str, Any] = option(
        {}, "verl's place for the top-level section checkpoint_engine; means the same"
    )

    @property
    def data_ranks(self) -> int:
        """The data-parallel ranks of one replica: more than 1 if they share its experts."""
        return self.data_parallel_size if self.expert_parallel_size > self.tensor_model_parallel_size else 1

    @property
    def replica_ranks(self) -> int:
        """The number of all ranks of one replica."""
        return self.tensor_model_parallel_size * self.data_ranks

    def why_not_dealt(self) -> str | None:
        """The problem with `expert_parallel_size` in words; empty if there is none."""
        tensor, data, experts = self.tensor_model_parallel_size, self.data_parallel_size, self.expert_parallel_size
        if experts in (1, tensor, tensor * data):
            return None
        wanted = [f"{tensor} (data-parallel ranks are then replicas of their own)" if data > 1 else str(tensor)]
        wanted += [f"{tensor * data} (they are one replica)"] if data > 1 else []
        ways = f"set it to {' or '.join(wanted)}"
        if experts % tensor == 0:
            ways += f", or data_parallel_size to {experts // tensor}"
        return (
            f"actor_rollout_ref.rollout.expert_parallel_size={experts}: experts are dealt out over all ranks of a "
            f"replica, of which there are tensor_model_parallel_size={tensor} times data_parallel_size={data}: {ways}"
        )
