"""What no single section can know: whether the sections fit together. Runs on the driver before any process starts."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from verl.checkpoint_engine.errors import BackendUnavailable
from verl.trainer.config.validate_teachers import distillation_problems
from verl.utils.config import ConfigError
from verl.workers.config import FSDPConfig, HFModelConfig, PPOConfig
from verl.workers.config.critic import CriticModelConfig


def validate(config: PPOConfig) -> None:
    """Raises ConfigError with the lines of `problems_of`."""
    if problems := problems_of(config):
        raise ConfigError("\n".join(problems))


def problems_of(config: PPOConfig, lacking: list[str] | None = None) -> list[str]:
    """A line for every combination that cannot work, with the values that clash.

    Imports the user's modules (`model.external_lib`, `checkpoint_engine.custom_backend_module`), since they may
    register the names that are looked up. Raises BackendUnavailable for one whose package is missing; with `lacking`,
    says so there.
    """
    problems: list[str] = []
    for check in CHECKS:
        try:
            problems.extend(check(config))
        except BackendUnavailable as exc:
            if lacking is None:
                raise
            lacking.append(str(exc))
    return problems


def _batch_sizes(config: PPOConfig) -> Iterator[str]:
    """The batch of a step splits evenly into optimizer steps, and every rank has a part in each of those."""
    trainer, policy = config.trainer, config.actor_rollout_ref
    prompts, responses = config.data.train_batch_size, policy.rollout.n
    mini, ranks = policy.actor.ppo_mini_batch_size, trainer.world_size
    if mini * responses < ranks:
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} * actor_rollout_ref.rollout.n={responses} = "
            f"{mini * responses} sequences are fewer than {ranks} trainer ranks "
            f"(trainer.nnodes={trainer.nnodes} * trainer.n_gpus_per_node={trainer.n_gpus_per_node})"
        )
    if prompts % mini:
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} does not divide data.train_batch_size={prompts}"
            " (both count prompts)"
        )


def _min_ranks(config: PPOConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.min_ranks is None or any(next(check(config), None) for check in CHECKS if check is not _min_ranks):
        return
    key = f"trainer.min_ranks={trainer.min_ranks}"
    if trainer.min_ranks >= trainer.world_size:
        yield f"{key} is not less than {trainer.world_size} trainer ranks: leave it null"
    elif trainer.max_restarts == 0:
        yield f"{key} needs trainer.max_restarts of 1 or more"
    elif not possible_fewer_ranks(config):
        layouts = trainer.fewer_ranks
        problems = problems_of(with_ranks(config, *layouts[0])) if layouts else ["hosts have the same number of them"]
        yield f"{key} allows no fewer ranks: {'; '.join(problems)}"


def possible_fewer_ranks(config: PPOConfig) -> list[tuple[int, int]]:
    """Those of `TrainerConfig.fewer_ranks` with which all else in `config` goes together."""
    return [layout for layout in config.trainer.fewer_ranks if not problems_of(with_ranks(config, *layout))]


def with_ranks(config: PPOConfig, nnodes: int, n_gpus_per_node: int) -> PPOConfig:
    """`config` with so many hosts, and ranks on each."""
    trainer = replace(config.trainer, nnodes=nnodes, n_gpus_per_node=n_gpus_per_node, min_ranks=None)
    return replace(config, trainer=trainer)


def _micro_batch_sizes(config: PPOConfig) -> Iterator[str]:
    policy = config.actor_rollout_ref
    for path, section in (("rollout", policy.rollout), ("ref", policy.ref)):
        if not section.log_prob_use_dynamic_bsz and not section.log_prob_micro_batch_size_per_gpu:
            yield (
                f"actor_rollout_ref.{path}.log_prob_micro_batch_size_per_gpu must be set when "
                f"actor_rollout_ref.{path}.log_prob_use_dynamic_bsz=false"
            )


def _lengths(config: PPOConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    for ours, theirs, name in (
        (rollout.prompt_length, config.data.max_prompt_length, "prompt_length"),
        (rollout.response_length, config.data.max_response_length, "response_length"),
    ):
        if ours is not None and ours != theirs:
            yield f"actor_rollout_ref.rollout.{name}={ours} differs from data.max_{name}={theirs}: leave it null"
    longest = config.data.max_prompt_length + config.data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield (
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} is less than data.max_prompt_length + "
            f"data.max_response_length = {longest}"
        )
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    budgets = {
        "actor.ppo_max_token_len_per_gpu": (actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.fsdp_config),
        "rollout.log_prob_max_token_len_per_gpu": (
            rollout.log_prob_use_dynamic_bsz,
            rollout.log_prob_max_token_len_per_gpu,
            actor.fsdp_config,
        ),
        "ref.log_prob_max_token_len_per_gpu": (
            ref.log_prob_use_dynamic_bsz,
            ref.log_prob_max_token_len_per_gpu,
            ref.fsdp_config,
        ),
    }
    told: set[int] = set()
    for name, (used, budget, fsdp) in budgets.items():
        sharers = 1 if actor.strategy == "megatron" else fsdp.ulysses_sequence_parallel_size
        if used and budget * sharers < longest and budget not in told:
            told.add(budget)  # the others follow the actor's
            yield (
                f"actor_rollout_ref.{name}={budget}{_times(sharers)} is less than one sequence: data.max_prompt_length "
                f"+ data.max_response_length = {longest}"
            )


def _times(sharers: int) -> str:
    return f" * ulysses_sequence_parallel_size={sharers}" if sharers > 1 else ""


def _algorithm(config: PPOConfig) -> Iterator[str]:
    """Keys that only mean something together."""
    algorithm, actor, rollout = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        yield "algorithm.kl_ctrl.type=adaptive has no effect with algorithm.use_kl_in_reward=false: set one of them"
    if rollout.temperature <= 0:
        yield (
            f"actor_rollout_ref.rollout.temperature={rollout.temperature} must be above 0 for training; "
            "rollout.val_kwargs.temperature is that of validation"
        )
    if not rollout.calculate_log_probs:
        for used, key in (
            (actor.use_rollout_log_probs, "actor_rollout_ref.actor.use_rollout_log_probs=true"),
            (
                algorithm.rollout_correction.rollout_is is not None,
                f"algorithm.rollout_correction.rollout_is={algorithm.rollout_correction.rollout_is}",
            ),
            (algorithm.rollout_correction.rejects, "algorithm.rollout_correction.rollout_rs"),
        ):
            if used:
                yield f"{key} needs actor_rollout_ref.rollout.calculate_log_probs=true, not false"
    replay = actor.megatron.router_replay.mode
    if replay != "disabled" and actor.strategy != "megatron":
        yield (
            f"actor_rollout_ref.actor.megatron.router_replay.mode={replay} needs actor_rollout_ref.actor.strategy="
            f"megatron, not {actor.strategy}, whose engine chooses experts anew in every pass"
        )
    if (replay == "R3") != rollout.enable_rollout_routing_replay:
        yield (
            f"actor_rollout_ref.actor.megatron.router_replay.mode={replay} with actor_rollout_ref.rollout."
            f"enable_rollout_routing_replay={str(rollout.enable_rollout_routing_replay).lower()}: R3 takes the experts "
            "that the rollout engine returns, and nothing else does"
        )
    if replay == "R2" and actor.use_rollout_log_probs:
        yield (
            "actor_rollout_ref.actor.megatron.router_replay.mode=R2 takes the experts from the pass of old log-probs, "
            "which algorithm.rollout_correction.bypass_mode=true leaves out"
        )
    if algorithm.rollout_correction.loss_type == "reinforce" and not actor.use_rollout_log_probs:
        yield (
            "algorithm.rollout_correction.loss_type=reinforce weighs with the rollout engine's log-probs: it needs "
            "algorithm.rollout_correction.bypass_mode=true"
        )


def _estimators(config: PPOConfig) -> Iterator[str]:
    """What estimators, and whoever chooses what they see, need."""
    algorithm, actor, rollout = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    filters = algorithm.filter_groups
    if filters.enable and not filters.metric:
        yield "algorithm.filter_groups.enable=true needs algorithm.filter_groups.metric, like acc"
    if filters.enable and filters.metric == "seq_final_reward" and algorithm.use_kl_in_reward:
        yield (
            "algorithm.filter_groups.metric=seq_final_reward with algorithm.use_kl_in_reward=true: groups are chosen "
            "before the KL penalty is known; take seq_reward"
        )
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if algorithm.adv_estimator == "gdpo" and not keys:
        yield (
            "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys, the components in the reward function's "
            "dict, like [format_reward,accuracy_reward]"
        )
    if weights and len(weights) != len(keys):
        yield f"algorithm.gdpo_reward_weights={weights} are {len(weights)} for {len(keys)} algorithm.gdpo_reward_keys"
    if algorithm.adv_estimator == "optimal_token_baseline" and actor.use_rollout_log_probs:
        yield (
            "algorithm.adv_estimator=optimal_token_baseline needs probabilities of the whole vocabulary, which the "
            "rollout engine's log-probs are not: algorithm.rollout_correction.bypass_mode=false"
        )
    if (
        algorithm.adv_estimator in ("rloo", "rloo_vectorized", "grpo_passk", "optimal_token_baseline", "gdpo")
        and rollout.n < 2
    ):
        yield (
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares the responses to one prompt with each other: "
            f"actor_rollout_ref.rollout.n={rollout.n} must be at least 2"
        )


def _critic(config: PPOConfig) -> Iterator[str]:
    """Runs after `_user_modules`, which may have registered the estimator."""
    from verl.trainer.ppo.core_algos import needs_values

    critic, name, ranks = config.critic, config.algorithm.adv_estimator, config.trainer.world_size
    if not needs_values(name):
        if critic.enable:
            yield f"critic.enable=true, but algorithm.adv_estimator={name} uses no critic; gae does"
        if config.trainer.critic_warmup:
            yield f"trainer.critic_warmup={config.trainer.critic_warmup} needs a critic; adv_estimator={name} has none"
        return
    if critic.enable is False:
        yield f"algorithm.adv_estimator={name} needs a critic, and critic.enable=false"
    mini = critic.ppo_mini_batch_size or config.actor_rollout_ref.actor.ppo_mini_batch_size
    if config.data.train_batch_size % mini:
        yield f"critic.ppo_mini_batch_size={mini} does not divide data.train_batch_size={config.data.train_batch_size}"
    if mini * config.actor_rollout_ref.rollout.n < ranks:
        yield (
            f"critic.ppo_mini_batch_size={mini} * actor_rollout_ref.rollout.n={config.actor_rollout_ref.rollout.n} "
            f"sequences are fewer than {ranks} trainer ranks"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    actor = config.actor_rollout_ref.actor
    follows = actor.use_dynamic_bsz and critic.ppo_max_token_len_per_gpu == actor.ppo_max_token_len_per_gpu
    sharers = 1 if critic.strategy == "megatron" else critic.fsdp.ulysses_sequence_parallel_size
    follows = follows and sharers == actor.fsdp_config.ulysses_sequence_parallel_size
    if critic.use_dynamic_bsz and critic.ppo_max_token_len_per_gpu * sharers < longest and not follows:
        yield (
            f"critic.ppo_max_token_len_per_gpu={critic.ppo_max_token_len_per_gpu}{_times(sharers)} is less than one "
            f"sequence: data.max_prompt_length + data.max_response_length = {longest}"
        )
    yield from _sharers("critic.fsdp", critic.fsdp, "critic.model", critic.model, critic.strategy, ranks)
    size = critic.fsdp.fsdp_size
    if size != -1 and (size <= 0 or ranks % size):
        yield f"critic.fsdp.fsdp_size={size} does not divide {ranks} trainer ranks"


def _rewards(config: PPOConfig) -> Iterator[str]:
    from verl.workers.reward_manager import overlong_penalty

    try:
        overlong_penalty(config.reward_model, config.data.max_response_length)
    except ConfigError as exc:
        yield str(exc)
    yield from _reward_model(config)


def _reward_model(config: PPOConfig) -> Iterator[str]:
    from verl.utils.device import resolve_device

    served, trainer = config.reward_model, config.trainer
    if not served.enable:
        return
    if served.enable_resource_pool and not served.nnodes:
        yield "reward_model.enable_resource_pool=true needs reward_model.nnodes, 1 or more"
    parallel = served.rollout.tensor_model_parallel_size
    devices = served.n_gpus_per_node if served.enable_resource_pool else trainer.n_gpus_per_node
    if resolve_device(trainer.device) != "cpu" and devices % parallel:
        yield (
            f"reward_model.rollout.tensor_model_parallel_size={parallel} does not divide the {devices} devices of a "
            "machine that serve the reward model"
        )
    shared = not served.enable_resource_pool and served.rollout.free_cache_engine
    if served.rollout.name == "sglang" and shared and resolve_device(trainer.device) != "cpu":
        yield (
            "reward_model.rollout.name=sglang keeps its memory: set reward_model.enable_resource_pool=true, for "
            "devices of its own, or reward_model.rollout.free_cache_engine=false"
        )
    if served.model.path is None:
        yield "reward_model.enable=true needs reward_model.model.path"


def _placement(config: PPOConfig) -> Iterator[str]:
    if not config.actor_rollout_ref.hybrid_engine and config.trainer.placement == "colocated":
        yield (
            "actor_rollout_ref.hybrid_engine=false: rollout engines have machines of their own in "
            "verl.experimental.one_step_off_policy.main_ppo and in "
            "verl.experimental.fully_async_policy.fully_async_main, or with trainer.placement=separate"
        )


def _ranks(config: PPOConfig) -> Iterator[str]:
    """Sharding groups are made of the trainer's ranks; so, on accelerators, are replicas that are not separate."""
    from verl.utils.device import resolve_device

    ranks, rollout = config.trainer.world_size, config.actor_rollout_ref.rollout
    for path, section in (("actor", config.actor_rollout_ref.actor), ("ref", config.actor_rollout_ref.ref)):
        size = section.fsdp_config.fsdp_size
        if size != -1 and (size <= 0 or ranks % size):
            yield f"actor_rollout_ref.{path}.fsdp_config.fsdp_size={size} does not divide {ranks} trainer ranks"
    colocated = config.trainer.placement == "colocated"
    if colocated and rollout.nnodes != 1:
        yield (
            f"actor_rollout_ref.rollout.nnodes={rollout.nnodes} needs trainer.placement=separate: "
            "rollout engines share the trainer's machines"
        )
    if resolve_device(config.trainer.device) == "cpu":
        return
    parallel, sizes = rollout.replica_ranks, "tensor_model_parallel_size"
    sizes += " * data_parallel_size" if rollout.data_ranks > 1 else ""
    per_node = config.trainer.n_gpus_per_node if colocated else rollout.n_gpus_per_node
    devices = ranks if colocated else rollout.nnodes * per_node
    owner = f"{ranks} trainer ranks" if colocated else f"{devices} rollout devices"
    if per_node % parallel:
        what = "trainer ranks" if colocated else "rollout devices"
        yield (f"actor_rollout_ref.rollout.{sizes}={parallel} does not divide {per_node} {what} of one machine")
    elif rollout.num_replicas is not None and rollout.num_replicas * parallel > devices:
        yield (
            f"actor_rollout_ref.rollout.num_replicas={rollout.num_replicas} * {sizes}={parallel} = "
            f"{rollout.num_replicas * parallel} exceeds {owner}"
        )


def _experts(config: PPOConfig) -> Iterator[str]:
    problem = config.actor_rollout_ref.rollout.why_not_dealt()
    if problem is not None:
        yield problem


def _sharing(config: PPOConfig) -> Iterator[str]:
    """Ranks that compute each sequence together are groups of the trainer's ranks."""
    policy, ranks, where = config.actor_rollout_ref, config.trainer.world_size, "actor_rollout_ref"
    told: set[int] = set()
    for name, section in (("actor", policy.actor.fsdp_config), ("ref", policy.ref.fsdp_config)):
        size = section.ulysses_sequence_parallel_size
        if size not in told:
            told.add(size)  # the reference policy's follows the actor's
            key = f"{where}.{name}.fsdp_config"
            yield from _sharers(key, section, f"{where}.model", policy.model, policy.actor.strategy, ranks)


def _sharers(
    path: str, fsdp: FSDPConfig, model_path: str, model: HFModelConfig | CriticModelConfig, strategy: str, ranks: int
) -> Iterator[str]:
    key = f"{path}.ulysses_sequence_parallel_size={fsdp.ulysses_sequence_parallel_size}"
    if fsdp.ulysses_sequence_parallel_size == 1:
        return
    if strategy == "megatron":
        yield f"{key} is for fsdp and fsdp2; strategy=megatron has tensor_model_parallel_size"
        return
    if ranks % fsdp.ulysses_sequence_parallel_size:
        yield f"{key} does not divide {ranks} trainer ranks (trainer.nnodes * trainer.n_gpus_per_node)"
    if not model.use_remove_padding:
        yield f"{key} needs {model_path}.use_remove_padding=true: ranks share sequences that are in one row"


def _reference(config: PPOConfig) -> Iterator[str]:
    """Megatron's process groups belong to the process, and the reference policy shares the actor's."""
    policy = config.actor_rollout_ref
    if policy.actor.strategy == "megatron" and (other := policy.ref.megatron.differences(policy.actor.megatron)):
        yield (
            f"actor_rollout_ref.ref.megatron: {', '.join(other)} differs from actor_rollout_ref.actor.megatron, whose "
            "ranks and groups the reference policy shares; leave it null"
        )


def _profiler(config: PPOConfig) -> Iterator[str]:
    from verl.utils.device import resolve_device
    from verl.workers.config.profiler import DEVICES_OF_TOOL

    rollout = config.actor_rollout_ref.rollout
    if rollout.profiler.enable and rollout.name != "vllm":
        yield f"actor_rollout_ref.rollout.profiler.enable=true traces vllm, not rollout.name={rollout.name}"
    if rollout.profiler.enable and config.trainer.placement != "colocated":
        yield (
            "actor_rollout_ref.rollout.profiler.enable=true traces generation of a step, and engines with "
            f"trainer.placement={config.trainer.placement} generate all the time: set it to false"
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


def _files(config: PPOConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    for key, path in (
        ("custom_reward_function.path", config.custom_reward_function.path),
        ("data.custom_cls.path", config.data.custom_cls.path),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path", rollout.multi_turn.tool_config_path),
        ("actor_rollout_ref.rollout.agent.agent_loop_config_path", rollout.agent.agent_loop_config_path),
    ):
        if path is not None and not path.startswith("pkg://") and not Path(path).expanduser().is_file():
            yield f"{key}={path}: no such file"


def _user_modules(config: PPOConfig) -> Iterator[str]:
    module = config.actor_rollout_ref.model.external_lib
    if module is not None:
        try:
            importlib.import_module(module)
        except ImportError as exc:
            yield f"actor_rollout_ref.model.external_lib={module} cannot be imported: {exc}"


def _registered_names(config: PPOConfig) -> Iterator[str]:
    """Names that registries know. Runs after `_user_modules`, which may have added some."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
    from verl.workers.engine.registry import TrainEngineRegistry
    from verl.workers.reward_manager import get_reward_manager_cls
    from verl.workers.rollout.registry import RolloutReplicaRegistry

    lookups: list[tuple[Callable[[str], object], str]] = [
        (get_adv_estimator_fn, config.algorithm.adv_estimator),
        (get_reward_manager_cls, config.reward_model.reward_manager),
        (get_policy_loss_fn, config.actor_rollout_ref.actor.policy_loss.loss_mode),
        (TrainEngineRegistry.require, config.actor_rollout_ref.actor.strategy),
        (RolloutReplicaRegistry.get, config.actor_rollout_ref.rollout.name),
    ]
    for look_up, name in lookups:
        try:
            look_up(name)
        except ConfigError as exc:
            yield str(exc)


def _lora(config: PPOConfig) -> Iterator[str]:
    policy = config.actor_rollout_ref
    if policy.model.lora_rank and policy.actor.strategy == "fsdp":
        yield (
            f"actor_rollout_ref.model.lora_rank={policy.model.lora_rank} needs actor_rollout_ref.actor.strategy=fsdp2 "
            "or megatron, not fsdp, which trains whole models"
        )


def _checkpoint_engine(config: PPOConfig) -> Iterator[str]:
    """The backend exists, its options are right, and it can do what this job needs. Runs after `_user_modules`."""
    from verl.checkpoint_engine.registry import resolve_backend
    from verl.utils.device import resolve_device

    try:
        needs = resolve_backend(config.checkpoint_engine).capabilities
    except ConfigError as exc:
        yield str(exc)
        return
    backend, device = config.checkpoint_engine.backend, resolve_device(config.trainer.device)
    separate = config.trainer.placement == "separate"
    if needs.same_host and separate and (config.trainer.nnodes > 1 or device != "cpu"):
        yield (
            f"checkpoint_engine.backend={backend} needs rollout engines on the trainer's machines, and "
            f"trainer.placement=separate with trainer.nnodes={config.trainer.nnodes} on {device} puts them on others"
        )
    if device not in needs.device_types:
        yield (
            f"checkpoint_engine.backend={backend} reads weights from {', '.join(needs.device_types)}, "
            f"not from trainer.device={device}"
        )


CHECKS: tuple[Callable[[PPOConfig], Iterator[str]], ...] = (
    _batch_sizes,
    _micro_batch_sizes,
    _lengths,
    _algorithm,
    _estimators,
    _rewards,
    distillation_problems,
    _placement,
    _ranks,
    _experts,
    _sharing,
    _reference,
    _profiler,
    _files,
    _user_modules,
    _registered_names,
    _critic,
    _lora,
    _checkpoint_engine,
    _min_ranks,
)
