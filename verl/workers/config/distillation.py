"""The `distillation` section: teachers that score what the student has written, and the loss made of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verl.utils.config import ConfigError, Section, from_mapping, option, section

ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Estimators of the KL divergence from the teacher by the sampled token."""
FORWARD_KL_TOPK = "forward_kl_topk"
ONLY_TEACHER = "teacher_model"
"""The name of a single teacher in verl's files."""


@dataclass(frozen=True, kw_only=True)
class DistillationLossConfig(Section):
    """How far the student is from its teacher, and what is done about it."""

    loss_mode: str = option(
        "k3",
        "per token: an estimator of the reverse KL divergence by the sampled token (kl is k1, mse k2, low_var_kl k3), "
        "or the forward one over the teacher's topk likeliest tokens",
        choices=(*ESTIMATORS, FORWARD_KL_TOPK),
    )
    topk: int = option(32, "forward_kl_topk: tokens of the teacher", least=1)
    use_task_rewards: bool = option(
        True, "add it to the policy loss; false: it is the whole loss, and rewards are only measured"
    )
    distillation_loss_coef: float = option(1.0, "its weight, with use_task_rewards=true", least=0)
    loss_max_clamp: float | None = option(None, "largest magnitude of a token's loss; null: any", above=0)
    log_prob_min_clamp: float | None = option(
        None, "forward_kl_topk: log-probs of student and teacher below it are taken for it; null: none is", most=0
    )
    use_policy_gradient: bool = option(
        False, "the negative loss of a token is its advantage in a clipped policy loss; false: its gradient is taken"
    )
    policy_loss_mode: str = option("vanilla", "use_policy_gradient: that policy loss", choices=("vanilla",))
    clip_ratio: float = option(0.2, "use_policy_gradient: its clip range, for a bound that is null", least=0)
    clip_ratio_low: float | None = option(0.2, "lower clip range", least=0)
    clip_ratio_high: float | None = option(0.2, "upper clip range", least=0)

    def __post_init__(self) -> None:
        if self.loss_mode in ("kl", "k1") and not self.use_policy_gradient:
            raise ConfigError(
                f"loss_mode={self.loss_mode} has the same gradient with any teacher: set use_policy_gradient=true, or "
                "another loss_mode"
            )
        if self.uses_topk and self.use_policy_gradient:
            raise ConfigError(
                f"loss_mode={self.loss_mode} is about tokens that were not sampled, which use_policy_gradient=true "
                "cannot make likelier: set it to false, or loss_mode=k1"
            )

    @property
    def uses_topk(self) -> bool:
        return self.loss_mode == FORWARD_KL_TOPK

    @property
    def num_candidates(self) -> int:
        """The number of candidate tokens that a teacher scores beside the sampled one."""
        return self.topk if self.uses_topk else 0


@dataclass(frozen=True, kw_only=True)
class TeacherInferenceConfig(Section):
    """The engines of one teacher."""

    name: str | None = option(None, "inference engine, for any rollout.name", choices=(None, "vllm"))
    dtype: str | None = option(
        None, "of weights and computation; null: rollout.dtype", choices=(None, "float32", "bfloat16", "float16")
    )
    tensor_model_parallel_size: int = option(2, "ranks of one engine", least=1)
    data_parallel_size: int = option(1, "engines of one replica: each has all of the weights", least=1)
    expert_parallel_size: int = option(
        1, "ranks over which experts are dealt out: 1, or tensor_model_parallel_size", least=1
    )
    gpu_memory_utilization: float = option(0.5, "share of a device's memory for one engine", above=0, most=1)
    cpu_kvcache_gib: float = option(0.5, "memory of the KV cache on cpu", above=0)
    enforce_eager: bool = option(True, "no CUDA graphs")
    cudagraph_capture_sizes: list[int] | None = option(None, "batch sizes of CUDA graphs; null: vLLM's", least=1)
    max_model_len: int | None = option(None, "longest sequence and one more token; null: what data says", least=2)
    max_num_seqs: int = option(1024, "sequences computed at once", least=1)
    max_num_batched_tokens: int = option(8192, "tokens computed at once", least=1)
    enable_chunked_prefill: bool = option(True, "split long sequences over engine steps")
    enable_prefix_caching: bool = option(True, "vLLM's cache of prefixes, which scored sequences do not read")
    load_format: str = option("auto", "how vLLM reads the weights", choices=("auto", "safetensors", "dummy"))
    engine_kwargs: dict[str, Any] = option({}, "passed to the engine: engine_kwargs.vllm.<argument>")


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(Section):
    """One teacher, below `distillation.teacher_models.<name>`."""

    key: str | None = option(None, "of several teachers: the samples that are its own, by distillation.teacher_key")
    model_path: str | None = option(None, "Hugging Face directory with the student's vocabulary")
    num_replicas: int = option(0, "replicas; 0 for a teacher that is alone: as many as its devices allow", least=0)
    trust_remote_code: bool = option(False, "allow code from the model directory")
    inference: TeacherInferenceConfig = section(TeacherInferenceConfig)

    @property
    def ranks_per_replica(self) -> int:
        return self.inference.tensor_model_parallel_size * self.inference.data_parallel_size


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Section):
    """On-policy distillation: the student learns from teachers on what it has written itself."""

    enabled: bool = option(False, "score every response with a teacher, and learn from that")
    nnodes: int = option(0, "machines of the teachers, which have devices of their own", least=0)
    n_gpus_per_node: int = option(8, "devices of each of these machines", least=1)
    teacher_key: str = option("data_source", "the column of the data that says which of several teachers a sample has")
    teacher_models: dict[str, Any] = option(
        {}, "the teachers, each below a name of its own: teacher_models.<name>.model_path"
    )
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig)

    @property
    def num_devices(self) -> int:
        return self.nnodes * self.n_gpus_per_node

    @cached_property
    def teachers(self) -> dict[str, TeacherConfig]:
        """The teachers by name. Raises ConfigError with a line for each problem."""
        path, problems = "distillation.teacher_models", list[str]()
        found: dict[str, TeacherConfig] = {}
        for name, values in self.teacher_models.items():
            if not isinstance(values, dict):
                problems.append(f"{path}.{name} is a section of keys; it cannot be set to {values}")
                continue
            found[name] = from_mapping(TeacherConfig, values, f"{path}.{name}", problems)
        if len(found) > 1 and found.get(ONLY_TEACHER, TeacherConfig()).model_path is None:
            found.pop(ONLY_TEACHER, None)  # verl's defaults of a teacher that is not used
        if problems:
            raise ConfigError("\n".join(problems))
        return found
