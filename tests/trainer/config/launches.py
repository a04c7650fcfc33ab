"""Launches as people of verl write them, and what becomes of each: accepted, or refused with a sentence.

python -m tests.trainer.config.launches      counts by mode and prints what is not as the table says
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from recipe.dapo import main_dapo
from verl.experimental.fully_async_policy import fully_async_main
from verl.experimental.one_step_off_policy import main_ppo as one_step_off
from verl.trainer.config.cli import run_hydra
from verl.trainer.main_ppo import check_ppo
from verl.utils.device import missing

MODES = {
    "hybrid": {"check": check_ppo},
    "dapo": {
        "check": check_ppo,
        "config_path": main_dapo.CONFIG_DIR,
        "config_name": main_dapo.CONFIG_NAME,
    },
    "one_step_off": {
        "check": partial(check_ppo, loop=one_step_off.LOOP),
        "config_path": one_step_off.CONFIG_DIR,
        "config_name": one_step_off.CONFIG_NAME,
    },
    "fully_async": {
        "check": partial(check_ppo, loop=fully_async_main.LOOP),
        "config_path": fully_async_main.CONFIG_DIR,
        "config_name": fully_async_main.CONFIG_NAME,
    },
}


@dataclass(frozen=True)
class Launch:
    name: str
    mode: str
    argv: str
    refused: str = ""
    """Part of the one error that it gets; empty: it is accepted."""
    said: str = ""
    """Part of what `--check` prints of it."""


A, R, F, M = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.actor.megatron",
)
C = "algorithm.rollout_correction"
D = "distillation.distillation_loss"
MTP = "actor_rollout_ref.model.mtp"
TAUGHT = "distillation.enabled=True distillation.nnodes=1"
GRPO = (
    "algorithm.adv_estimator=grpo data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 "
    "data.filter_overlong_prompts=True data.truncation=error actor_rollout_ref.model.path=builtin:tiny-qwen2 "
    f"{A}.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True {A}.ppo_mini_batch_size=256 "
    f"{A}.ppo_micro_batch_size_per_gpu=32 {A}.use_kl_loss=True {A}.kl_loss_coef=0.001 {A}.kl_loss_type=low_var_kl "
    f"{A}.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True "
    f"{A}.fsdp_config.param_offload=False {A}.fsdp_config.optimizer_offload=False {R}.tensor_model_parallel_size=2 "
    f"{R}.log_prob_micro_batch_size_per_gpu=32 {R}.name=vllm {R}.gpu_memory_utilization=0.6 {R}.n=8 "
    f"{F}.log_prob_micro_batch_size_per_gpu=32 {F}.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False "
    "trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15"
)
ASYNC = (
    f"{GRPO} actor_rollout_ref.hybrid_engine=False trainer.n_gpus_per_node=4 rollout.nnodes=1 rollout.n_gpus_per_node=4"
)
MEGATRON = (
    f"--config-path=config --config-name=ppo_megatron_trainer.yaml {GRPO} {M}.tensor_model_parallel_size=2 "
    f"{M}.pipeline_model_parallel_size=2 {F}.megatron.tensor_model_parallel_size=2 "
    f"{F}.megatron.pipeline_model_parallel_size=2"
)
DAPO = (
    "reward.reward_manager.name=dapo +reward.reward_kwargs.overlong_buffer_cfg.enable=True "
    "+reward.reward_kwargs.overlong_buffer_cfg.len=512 +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 "
    "+reward.reward_kwargs.overlong_buffer_cfg.log=False +reward.reward_kwargs.max_resp_len=1024 "
    f"{A}.clip_ratio_low=0.2 {A}.clip_ratio_high=0.28 {A}.clip_ratio_c=10.0 {A}.loss_agg_mode=token-mean"
)
FILTER = (
    "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc "
    "algorithm.filter_groups.max_num_gen_batches=10"
)
OFFLOAD = f"{M}.param_offload=True {M}.grad_offload=True {M}.optimizer_offload=True {F}.megatron.param_offload=True"
RECOMPUTE = " ".join(
    f"+{M}.override_transformer_config.{key}"
    for key in ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
)

LAUNCHES = (
    Launch("grpo", "hybrid", GRPO),
    Launch("fsdp2", "hybrid", f"{GRPO} {A}.strategy=fsdp2 {A}.fsdp_config.strategy=fsdp2 {F}.strategy=fsdp2"),
    Launch(
        "ppo with a critic, as verl 0.7 writes it",
        "hybrid",
        f"{GRPO} algorithm.adv_estimator=gae critic.optim.lr=1e-5 critic.model.use_remove_padding=True "
        "critic.model.path=builtin:tiny-qwen2 critic.ppo_micro_batch_size_per_gpu=32 "
        "critic.model.fsdp_config.param_offload=False critic.model.fsdp_config.optimizer_offload=False",
    ),
    Launch(
        "dynamic batches whose budgets follow the actor's",
        "hybrid",
        f"{GRPO} {A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=24000 {A}.ppo_micro_batch_size_per_gpu=null",
        said="micro-batches of up to 24000 tokens",
    ),
    Launch("dapo", "hybrid", f"{GRPO} {DAPO}", said="rewards dapo"),
    Launch(
        "dapo, as verl 0.7 writes it",
        "hybrid",
        f"{GRPO} reward_model.reward_manager=dapo +reward_model.reward_kwargs.max_resp_len=1024",
    ),
    Launch("gspo", "hybrid", f"{GRPO} {A}.policy_loss.loss_mode=gspo {A}.clip_ratio_low=0.0003", said="loss gspo"),
    Launch("sapo", "hybrid", f"{GRPO} {A}.policy_loss.loss_mode=sapo {A}.tau_pos=1.0 {A}.tau_neg=1.05"),
    Launch("cispo", "hybrid", f"{GRPO} {A}.policy_loss.loss_mode=cispo"),
    Launch("geo_mean", "hybrid", f"{GRPO} {A}.policy_loss.loss_mode=geo_mean"),
    Launch(
        "ulysses",
        "hybrid",
        f"{GRPO} {A}.ulysses_sequence_parallel_size=4 {F}.ulysses_sequence_parallel_size=4",
        said="8 ranks (1 x 8) on cpu, fsdp2 (sequences shared by 4 ranks)",
    ),
    Launch(
        "ulysses, with budgets of a part of a sequence",
        "hybrid",
        f"{GRPO} {A}.ulysses_sequence_parallel_size=2 {A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=768",
        said="micro-batches of up to 768 tokens of every rank",
    ),
    Launch(
        "ulysses, with too small a budget",
        "hybrid",
        f"{GRPO} {A}.ulysses_sequence_parallel_size=2 {A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=767",
        refused="ppo_max_token_len_per_gpu=767 * ulysses_sequence_parallel_size=2 is less than one sequence",
    ),
    Launch(
        "ulysses, said in fsdp_config",
        "hybrid",
        f"{GRPO} {A}.fsdp_config.ulysses_sequence_parallel_size=2 {A}.ulysses_sequence_parallel_size=1",
        said="sequences shared by 2 ranks",
    ),
    Launch(
        "ulysses, said twice",
        "hybrid",
        f"{GRPO} {A}.fsdp_config.ulysses_sequence_parallel_size=2 {A}.ulysses_sequence_parallel_size=4",
        refused=f"{A}.fsdp_config.ulysses_sequence_parallel_size=2 is the same key",
    ),
    Launch(
        "ulysses among ranks that it does not divide",
        "hybrid",
        f"{GRPO} {A}.ulysses_sequence_parallel_size=3",
        refused=f"{A}.fsdp_config.ulysses_sequence_parallel_size=3 does not divide 8 trainer ranks",
    ),
    Launch(
        "ulysses with padding",
        "hybrid",
        f"{GRPO} {A}.ulysses_sequence_parallel_size=2 actor_rollout_ref.model.use_remove_padding=False",
        refused="needs actor_rollout_ref.model.use_remove_padding=true",
    ),
    Launch(
        "ulysses of a critic",
        "hybrid",
        f"{GRPO} algorithm.adv_estimator=gae critic.ulysses_sequence_parallel_size=3",
        refused="critic.fsdp.ulysses_sequence_parallel_size=3 does not divide 8 trainer ranks",
    ),
    Launch(
        "ulysses with more ranks than the model has heads",
        "hybrid",
        f"{GRPO} {A}.ulysses_sequence_parallel_size=8",
        said="8 ranks cannot share the 4 attention heads of the model Qwen2ForCausalLM",
    ),
    Launch("no ulysses", "hybrid", f"{GRPO} {A}.ulysses_sequence_parallel_size=1"),
    Launch(
        "switches of speed",
        "hybrid",
        f"{GRPO} {A}.use_torch_compile=False actor_rollout_ref.model.use_fused_kernels=True {R}.layered_summon=True "
        f"{R}.load_format=safetensors {A}.entropy_checkpointing=True +actor_rollout_ref.model.use_shm=True",
        said="warning: actor_rollout_ref.model.use_fused_kernels=true",
    ),
    Launch(
        "a logger whose package is not here",
        "hybrid",
        f"{GRPO} trainer.logger=[console,trackio]",
        said="" if find_spec("trackio") else "not here: trainer.logger=trackio needs the package 'trackio'",
    ),
    Launch("remax", "hybrid", f"{GRPO} algorithm.adv_estimator=remax", said="algorithm: remax"),
    Launch(
        "the optimal token baseline",
        "hybrid",
        f"{GRPO} algorithm.adv_estimator=optimal_token_baseline {A}.calculate_sum_pi_squared=True",
        said="one more pass",
    ),
    Launch(
        "gdpo",
        "hybrid",
        f"{GRPO} algorithm.adv_estimator=gdpo +algorithm.gdpo_reward_keys=[accuracy,format] "
        "reward.reward_manager.name=gdpo",
    ),
    Launch("gdpo without components", "hybrid", f"{GRPO} algorithm.adv_estimator=gdpo", refused="gdpo_reward_keys"),
    Launch("a KL loss with another gradient", "hybrid", f"{GRPO} {A}.kl_loss_type=k3+"),
    Launch("dppo", "hybrid", f"{GRPO} {A}.policy_loss.loss_mode=dppo_tv", said="loss dppo_tv"),
    Launch(
        "kl_cov",
        "hybrid",
        f"{GRPO} {A}.policy_loss.loss_mode=kl_cov {A}.policy_loss.kl_cov_ratio=0.002 {A}.policy_loss.ppo_kl_coef=1",
    ),
    Launch(
        "all of dapo",
        "dapo",
        f"{GRPO} {DAPO} {FILTER} data.gen_batch_size=3072 reward_model.overlong_buffer.enable=True "
        "reward_model.overlong_buffer.len=512 reward_model.overlong_buffer.penalty_factor=1.0",
        said="rewards dapo",
    ),
    Launch("dapo with megatron", "dapo", f"--config-name=dapo_megatron_trainer {GRPO}", said="megatron"),
    Launch("dynamic sampling, one step off", "one_step_off", f"{ASYNC} {FILTER}", said="rewards"),
    Launch("dynamic sampling, fully async", "fully_async", f"{ASYNC} {FILTER}", said="rewards"),
    Launch(
        "dynamic sampling without a metric",
        "hybrid",
        f"{GRPO} algorithm.filter_groups.enable=True algorithm.filter_groups.metric=null",
        refused="filter_groups.metric",
    ),
    Launch("loggers", "hybrid", f"{GRPO} trainer.logger=[console,file]"),
    Launch(
        "sizes over all ranks",
        "hybrid",
        f"{GRPO} {A}.ppo_micro_batch_size_per_gpu=null {A}.ppo_micro_batch_size=128",
        said="micro-batches of 16 sequences",
    ),
    Launch(
        "lora",
        "hybrid",
        f"{GRPO} {A}.strategy=fsdp2 actor_rollout_ref.model.lora.rank=16 actor_rollout_ref.model.lora.alpha=32",
    ),
    Launch(
        "lora beside layers of megatron",
        "hybrid",
        f"{GRPO} model_engine=megatron {M}.tensor_model_parallel_size=2 actor_rollout_ref.model.lora.rank=16 "
        "actor_rollout_ref.model.lora.target_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2] "
        f"{M}.dtype=float16 actor_rollout_ref.model.lora.dtype=float16",
    ),
    Launch(
        "rollouts of another run, and a sandbox for code",
        "hybrid",
        f"{GRPO} skip.rollout.enable=True skip.rollout.dump_dir=/data skip.rollout.steps=[1] skip.rollout.action=cache "
        "reward.reward_manager.name=prime reward.sandbox_fusion.url=http://sandbox/run_code",
        said="warning: skip.rollout.enable=true: every step generates its responses",
    ),
    Launch(
        "batches that do not divide over the ranks",
        "fully_async",
        f"{ASYNC} trainer.n_gpus_per_node=6 {A}.fsdp_config.fsdp_size=2 data.train_batch_size=0 data.gen_batch_size=1",
    ),
    Launch(
        "a reward model on the trainer's devices, whose files are a stand-in",
        "hybrid",
        f"{GRPO} reward.reward_model.enable=True reward.reward_model.model_path=builtin:tiny-qwen2 "
        "reward.reward_model.rollout.name=vllm reward.reward_model.rollout.gpu_memory_utilization=0.8 "
        "reward.reward_model.rollout.tensor_model_parallel_size=1 reward.reward_model.rollout.prompt_length=2048 "
        "reward.reward_model.rollout.skip_tokenizer_init=False reward.num_workers=8",
        said="the model has no score head",
    ),
    Launch(
        "a reward model with keys of engines that shard it",
        "hybrid",
        f"{GRPO} reward_model.enable=True reward_model.model.path=builtin:tiny-qwen2 reward_model.strategy=megatron "
        "reward_model.model.fsdp_config.param_offload=True reward_model.micro_batch_size_per_gpu=32 "
        "reward_model.megatron.tensor_model_parallel_size=2 reward_model.use_dynamic_bsz=True",
        said="reward_model.strategy=megatron: an inference engine computes the reward model",
    ),
    Launch(
        "a reward model on SGLang, as verl 0.7 writes it",
        "hybrid",
        f"{GRPO} reward_model.enable=True reward_model.enable_resource_pool=True reward_model.nnodes=1 "
        "reward_model.model.path=builtin:tiny-qwen2 reward_model.rollout.name=sglang "
        "reward_model.rollout.free_cache_engine=False",
        said="reward model: builtin:tiny-qwen2 by sglang",
    ),
    Launch(
        "a reward model by an engine that is not here",
        "hybrid",
        f"{GRPO} reward_model.enable=True reward_model.model.path=builtin:tiny-qwen2 reward_model.rollout.name=trtllm",
        refused="reward_model.rollout.name='trtllm' is not one of: vllm, sglang",
    ),
    Launch(
        "policy filtration",
        "hybrid",
        f"{GRPO} algorithm.adv_estimator=gae algorithm.use_pf_ppo=True algorithm.pf_ppo.reweight_method=pow "
        "algorithm.pf_ppo.weight_pow=2.0",
    ),
    Launch(
        "policy filtration by a method that is not known",
        "hybrid",
        f"{GRPO} algorithm.use_pf_ppo=True algorithm.pf_ppo.reweight_method=min",
        refused="algorithm.pf_ppo.reweight_method='min'",
    ),
    Launch(
        "distributed checkpoints whose place is not said",
        "hybrid",
        f"{MEGATRON} {M}.use_dist_checkpointing=True {F}.megatron.use_dist_checkpointing=True",
        said="weights are read from the Hugging Face directory",
    ),
    Launch(
        "a distributed checkpoint that is not there",
        "hybrid",
        f"{MEGATRON} {M}.use_dist_checkpointing=True {M}.dist_checkpointing_path=/nowhere",
        refused="is no distributed checkpoint of Megatron's: it has no metadata.json",
    ),
    Launch(
        "a schedule of Megatron's",
        "hybrid",
        f"{MEGATRON} {A}.optim.lr_decay_style=linear {A}.optim.lr_warmup_init=1e-8 {A}.optim.lr_warmup_steps=10 "
        f"{A}.ppo_micro_batch_size_per_gpu=7",
    ),
    Launch(
        "a profiler of devices that are not here",
        "hybrid",
        f"{GRPO} {A}.profiler.enable=True {A}.profiler.all_ranks=True {A}.profiler.ranks=[0,4] "
        f"{A}.profiler.tool_config.npu.level=level0 global_profiler.tool=npu global_profiler.steps=[2,4]",
        said="global_profiler.tool=npu: nothing is traced",
    ),
    Launch(
        "traces of trainer ranks and of rollout engines",
        "hybrid",
        f"{GRPO} {A}.profiler.enable=True {A}.profiler.ranks=[0] {R}.profiler.enable=True {R}.profiler.ranks=[0] "
        f"{R}.profiler.tool_config.torch.discrete=True global_profiler.tool=torch global_profiler.steps=[1,2]",
        said="no effect: actor_rollout_ref.rollout.profiler.ranks=[0]",
    ),
    Launch(
        "nsys, as it is written and not switched on",
        "hybrid",
        f"{GRPO} {A}.profiler.enable=False {A}.profiler.all_ranks=True {A}.profiler.ranks=[0,4] "
        "global_profiler.tool=nsys global_profiler.steps=[1] global_profiler.global_tool_config.nsys.discrete=True",
    ),
    Launch(
        "a path to resume from that is not asked for",
        "hybrid",
        f"{GRPO} trainer.resume_from_path=checkpoints/",
        said="only trainer.resume_mode=resume_path goes on from there",
    ),
    Launch(
        "experts over more ranks than a replica has",
        "hybrid",
        f"{GRPO} {R}.data_parallel_size=2 {R}.expert_parallel_size=8",
        refused="set it to 2 (data-parallel ranks are then replicas of their own) or 4 (they are one replica), or "
        "data_parallel_size to 4",
    ),
    Launch(
        "experts over data-parallel ranks",
        "hybrid",
        f"{GRPO} {R}.data_parallel_size=4 {R}.expert_parallel_size=8",
        said="replicas of 8 ranks (TP 2, DP 4, EP 8: experts are dealt out over all of them)",
    ),
    Launch(
        "experts over the ranks of a replica",
        "hybrid",
        f"{GRPO} {R}.expert_parallel_size=2 {R}.cudagraph_capture_sizes=[8,16]",
        said="replicas of 2 ranks (EP 2)",
    ),
    Launch(
        "data-parallel engines",
        "hybrid",
        f"{GRPO} {R}.data_parallel_size=4",
        said="replicas of 2 ranks (each of data_parallel_size is a replica of its own)",
    ),
    Launch(
        "data-parallel engines as one",
        "hybrid",
        f"{GRPO} {R}.engine_kwargs.vllm.data_parallel_size=4",
        refused="is decided by rollout.data_parallel_size and rollout.expert_parallel_size",
    ),
    Launch(
        "what saves memory or time",
        "hybrid",
        f"{MEGATRON} {A}.use_prefix_grouper=True {M}.use_megatron_fsdp=True transfer_queue.enable=True",
        said="transfer_queue.enable=true: batches go through the driver",
    ),
    Launch(
        "training in float8",
        "hybrid",
        f"{MEGATRON} +{M}.override_transformer_config.fp8=e4m3",
        refused="override_transformer_config.fp8: layers that compute in fp8 are Transformer Engine's",
    ),
    Launch(
        "engines in float8",
        "fully_async",
        f"{ASYNC} data.train_batch_size=0 data.gen_batch_size=1 +{R}.quantization=fp8 {C}.rollout_is=token "
        f"{R}.prometheus.enable=True {R}.prometheus.port=44398 trainer.device=cuda",
        said="quantization: fp8, which rollout correction accounts for",
    ),
    Launch(
        "engines in float8 that nothing accounts for",
        "hybrid",
        f"{GRPO} {R}.quantization=fp8 {R}.quantization_config_file=null",
        said="sampled from rounded weights, without correction: algorithm.rollout_correction.rollout_is=token would",
    ),
    Launch(
        "engines in float8 of another width",
        "hybrid",
        f"{GRPO} {R}.quantization=fp8 {R}.dtype=float16",
        refused="quantization=fp8 needs actor_rollout_ref.rollout.dtype=bfloat16",
    ),
    Launch(
        "engines in float8 on Ascend",
        "hybrid",
        f"{GRPO} {R}.quantization=fp8 trainer.device=npu",
        refused="on npu the engine of actor_rollout_ref.rollout.name=vllm does not quantize",
    ),
    Launch(
        "engines in float8 that are not compared",
        "hybrid",
        f"{GRPO} {R}.quantization=fp8 checkpoint_engine.check_engine=off",
        refused="needs checkpoint_engine.check_engine=first or always",
    ),
    Launch(
        "another way to quantize",
        "hybrid",
        f"{GRPO} {R}.engine_kwargs.vllm.quantization=fp8_per_tensor",
        refused="engine_kwargs.vllm.quantization is decided by rollout.quantization",
    ),
    Launch(
        "a profiler that is off",
        "hybrid",
        f"{GRPO} {A}.profiler.enable=False {R}.profiler.enable=False {F}.profiler.enable=False "
        f"{A}.profiler.tool_config.npu.level=level0 global_profiler.tool=npu",
    ),
    Launch("clip_grad and a schedule", "hybrid", f"{GRPO} {A}.optim.clip_grad=0.5 {A}.optim.lr_decay_style=constant"),
    Launch(
        "megatron", "hybrid", f"{MEGATRON} {M}.use_mbridge=True {M}.use_dist_checkpointing=False", said="TP 2, PP 2"
    ),
    Launch("megatron by model_engine", "hybrid", f"model_engine=megatron {GRPO}", said="megatron (TP 1"),
    Launch("megatron with offload", "hybrid", f"{MEGATRON} {OFFLOAD} {RECOMPUTE}", said="stays on its device"),
    Launch(
        "megatron with context parallelism",
        "hybrid",
        f"{MEGATRON} {M}.context_parallel_size=2 {M}.virtual_pipeline_model_parallel_size=null",
        said="context_parallel_size=2: sequences are not split",
    ),
    Launch("one step off", "one_step_off", ASYNC, said="separate"),
    Launch(
        "one step off that rejects sequences",
        "one_step_off",
        f"{ASYNC} {R}.calculate_log_probs=True {C}.rollout_is=null {C}.rollout_is_threshold=null "
        f"{C}.rollout_rs=seq_mean_k1 {C}.rollout_rs_threshold=0.999_1.001 {C}.bypass_mode=false",
    ),
    Launch(
        "the plain policy gradient with importance weights",
        "hybrid",
        f"{GRPO} algorithm.adv_estimator=rloo {C}.bypass_mode=true {C}.loss_type=reinforce {C}.rollout_is=sequence "
        f"{C}.rollout_is_batch_normalize=true {C}.rollout_is_threshold=2.0 {C}.rollout_rs=null",
    ),
    Launch(
        "rejection as older releases name it",
        "hybrid",
        f"{GRPO} {C}.rollout_rs=geometric {C}.rollout_rs_threshold=1.01",
    ),
    Launch(
        "bounds that are read as one number",
        "hybrid",
        f"{GRPO} {C}.rollout_is=token {C}.rollout_is_threshold=0.5_2",
        refused="two bounds are written like 0.5_2.0",
    ),
    Launch(
        "one step off with megatron",
        "one_step_off",
        f"--config-path=config --config-name=one_step_off_ppo_megatron_trainer.yaml {ASYNC}",
        said="megatron",
    ),
    Launch(
        "fully async",
        "fully_async",
        f"{ASYNC} {DAPO} data.train_batch_size=0 data.gen_batch_size=1 rollout.total_rollout_steps=51200 "
        "async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 "
        "async_training.require_batches=1 async_training.partial_rollout=True "
        "algorithm.rollout_correction.bypass_mode=True",
    ),
    Launch(
        "fully async with dapo",
        "fully_async",
        f"--config-path=config --config-name=fully_async_dapo_trainer.yaml {ASYNC} {DAPO}",
        said="rewards dapo",
    ),
    Launch(
        "groups to choose from, fully async",
        "fully_async",
        f"--config-name=fully_async_dapo_trainer {ASYNC} algorithm.filter_groups.enable=True "
        "algorithm.filter_groups.metric=acc",
        said="algorithm: grpo",
    ),
    Launch(
        "fully async with nccl, without a device here",
        "fully_async",
        f"{ASYNC} trainer.device=cuda {R}.checkpoint_engine.backend=nccl",
        said="not here: trainer.device=cuda: " if missing("cuda") else "on cuda",
    ),
    Launch("another rollout engine", "hybrid", f"{GRPO} {R}.name=trtllm", refused="rollout.name='trtllm'"),
    Launch("another training engine", "hybrid", f"{GRPO} model_engine=veomni", refused="fsdp, fsdp2 and megatron"),
    Launch("no hybrid engine", "hybrid", f"{GRPO} actor_rollout_ref.hybrid_engine=False", refused="machines of their"),
    Launch(
        "a reward model without a place",
        "hybrid",
        f"{GRPO} reward.reward_model.enable=True reward.reward_model.rollout.name=vllm",
        refused="reward_model.enable=true needs reward_model.model.path",
    ),
    Launch(
        "stages in which embedding and loss count as layers",
        "hybrid",
        f"{MEGATRON} +{M}.override_transformer_config.account_for_embedding_in_pipeline_split=True "
        f"+{M}.override_transformer_config.account_for_loss_in_pipeline_split=True",
        said="TP 2, PP 2",
    ),
    Launch(
        "experts that are chosen once for a step",
        "hybrid",
        f"{MEGATRON} {M}.router_replay.mode=R2",
        said="router_replay.mode=R2, but the model has no experts",
    ),
    Launch(
        "experts that the rollout engine chose",
        "hybrid",
        f"{MEGATRON} {M}.router_replay.mode=R3 {R}.enable_rollout_routing_replay=True",
        said="on cuda, megatron",
    ),
    Launch(
        "experts of a rollout engine that does not tell them here",
        "hybrid",
        f"{MEGATRON} {M}.router_replay.mode=R3 {R}.enable_rollout_routing_replay=True trainer.device=cpu",
        refused="on cpu the engine of actor_rollout_ref.rollout.name=vllm does not report which experts it chose",
    ),
    Launch(
        "experts that nobody asks the rollout engine for",
        "hybrid",
        f"{MEGATRON} {A}.router_replay.mode=R3",
        refused="R3 takes the experts that the rollout engine returns",
    ),
    Launch(
        "experts that are chosen once, on FSDP",
        "hybrid",
        f"{GRPO} {A}.router_replay.mode=R2",
        refused="needs actor_rollout_ref.actor.strategy=megatron",
    ),
    Launch(
        "a field that Megatron has not",
        "hybrid",
        f"{MEGATRON} +{M}.override_transformer_config.recompute_granularty=full",
        refused="Did you mean 'recompute_granularity'?",
    ),
    Launch(
        "distillation by policy gradient alone",
        "hybrid",
        f"{GRPO} {TAUGHT} distillation.teacher_models.teacher_model.model_path=builtin:tiny-qwen2 {D}.loss_mode=k1 "
        f"distillation.teacher_models.teacher_model.inference.free_cache_engine=True {D}.use_policy_gradient=True "
        f"{D}.use_task_rewards=False {D}.loss_max_clamp=10.0 {D}.log_prob_min_clamp=-10.0 {A}.use_kl_loss=True",
        said="distillation: k1 by policy gradient, in the place of the policy loss",
    ),
    Launch(
        "two teachers, whose files are elsewhere",
        "one_step_off",
        f"{GRPO} {TAUGHT} {D}.loss_mode=forward_kl_topk {D}.topk=64 +distillation.teacher_models.math.key=math "
        "+distillation.teacher_models.math.model_path=Qwen/Qwen3-32B +distillation.teacher_models.math.num_replicas=1 "
        "+distillation.teacher_models.code.key=code +distillation.teacher_models.code.model_path=Qwen/Qwen3-Coder "
        "+distillation.teacher_models.code.num_replicas=1 "
        "+distillation.teacher_models.code.inference.skip_tokenizer_init=True",
        said="not here: distillation.teacher_models.code.model_path=Qwen/Qwen3-Coder must be a directory where the run",
    ),
    Launch(
        "distillation from nobody", "hybrid", f"{GRPO} {TAUGHT}", refused="distillation.enabled=true needs a teacher"
    ),
    Launch(
        "a teacher with a typing mistake",
        "hybrid",
        f"{GRPO} {TAUGHT} +distillation.teacher_models.math.model_pth=x",
        refused="unknown configuration key 'distillation.teacher_models.math.model_pth'. Did you mean 'model_path'?",
    ),
    Launch(
        "a teacher on an engine that is not here",
        "hybrid",
        f"{GRPO} {TAUGHT} +distillation.teacher_models.a.model_path=builtin:tiny-qwen2 "
        "+distillation.teacher_models.a.inference.name=sglang",
        refused="distillation.teacher_models.a.inference.name='sglang' is not one of: null, vllm",
    ),
    Launch(
        "a teacher whose sequences are too short",
        "hybrid",
        f"{GRPO} {TAUGHT} +distillation.teacher_models.a.model_path=builtin:tiny-qwen2 "
        "+distillation.teacher_models.a.inference.max_model_len=1536",
        refused="max_model_len=1536 is less than data.max_prompt_length + data.max_response_length + 1 = 1537",
    ),
    Launch(
        "distillation of whole distributions on Megatron",
        "hybrid",
        f"{MEGATRON} {TAUGHT} distillation.teacher_models.teacher_model.model_path=builtin:tiny-qwen2 "
        f"{D}.loss_mode=forward_kl_topk",
        refused="needs actor_rollout_ref.actor.strategy=fsdp or fsdp2",
    ),
    Launch(
        "distillation whose gradient no teacher changes",
        "hybrid",
        f"{GRPO} {TAUGHT} distillation.teacher_models.teacher_model.model_path=builtin:tiny-qwen2 {D}.loss_mode=k1",
        refused="loss_mode=k1 has the same gradient with any teacher",
    ),
    Launch(
        "built-in training data that do not exist",
        "hybrid",
        "data.train_files=builtin:arithmetics",
        refused="there is no built-in data set 'builtin:arithmetics'. Did you mean 'builtin:arithmetic'?",
    ),
    Launch(
        "built-in data to validate on that do not exist",
        "hybrid",
        "data.val_files=[builtin:arithmetics]",
        refused="there is no built-in data set 'builtin:arithmetics'. Did you mean 'builtin:arithmetic'?",
    ),
    Launch(
        "a built-in critic that does not exist",
        "hybrid",
        "algorithm.adv_estimator=gae critic.model.path=builtin:tiny-qwen9",
        refused="there is no built-in model 'builtin:tiny-qwen9'. Did you mean 'builtin:tiny-qwen2'?",
    ),
    Launch(
        "a built-in teacher that does not exist",
        "hybrid",
        f"{GRPO} {TAUGHT} +distillation.teacher_models.a.model_path=builtin:tiny-qwen9",
        refused="there is no built-in model 'builtin:tiny-qwen9'. Did you mean 'builtin:tiny-qwen2'?",
    ),
    Launch(
        "a built-in reward model that does not exist",
        "hybrid",
        f"{GRPO} reward.reward_model.enable=True reward.reward_model.model_path=builtin:tiny-qwen9 "
        "reward.reward_model.rollout.name=vllm",
        refused="there is no built-in model 'builtin:tiny-qwen9'. Did you mean 'builtin:tiny-qwen2'?",
    ),
    Launch(
        "drafts by multi-token prediction",
        "fully_async",
        f"{ASYNC} {MTP}.enable=True {MTP}.enable_train=False {MTP}.enable_rollout=True {MTP}.speculative_num_steps=3",
        said="model.mtp.enable=true: the head that predicts more tokens is neither trained nor used for drafts",
    ),
    Launch(
        "a head of multi-token prediction that is trained alone",
        "hybrid",
        f"{MEGATRON} {MTP}.enable=True {MTP}.enable_train=True {MTP}.detach_encoder=True",
        said="the same policy, slower",
    ),
    Launch(
        "multi-token prediction that trains the policy",
        "hybrid",
        f"{MEGATRON} {MTP}.enable=True {MTP}.enable_train=True {MTP}.mtp_loss_scaling_factor=0.1",
        refused="set actor_rollout_ref.model.mtp.detach_encoder=true, with which it trains no more than a head",
    ),
    Launch(
        "tokens of conversations that are kept",
        "hybrid",
        f"{GRPO} data.continuous_token.enable=True data.continuous_token.model_family=qwen3",
        said="conversations keep the tokens that were generated in any case",
    ),
    Launch(
        "sequence parallelism among Megatron's own fields",
        "hybrid",
        f"{MEGATRON} +{M}.override_transformer_config.sequence_parallel=True",
        said="TP 2, PP 2",
    ),
    Launch(
        "pictures, as every launch of verl's with some names their column",
        "hybrid",
        f"{GRPO} data.image_key=images data.video_key=films data.audio_key=sounds data.return_raw_chat=True "
        f"data.return_multi_modal_inputs=False +{R}.engine_kwargs.vllm.mm_processor_cache_gb=0 "
        "data.image_patch_size=16 trainer.logger='[console,wandb]'",
        said="stand-in: builtin:tiny-qwen2 reads text: that the run's own model sees (qwen2_vl",
    ),
    *(
        Launch(
            f"pictures with {key}, for a model that stands in",
            "hybrid",
            f"{argv} data.image_key=images {key}",
            refused="data.image_key asks for a model that sees, which has not",
        )
        for argv, key in (
            (GRPO, f"{R}.name=sglang"),
            (f"{GRPO} {TAUGHT}", "distillation.teacher_models.teacher_model.model_path=builtin:tiny-qwen2"),
            (MEGATRON, ""),
        )
    ),
    *(
        Launch(
            f"pictures in {mode} mode {key}, for a model that stands in",
            mode,
            f"{argv} data.image_key=images {key}",
            said="stand-in: builtin:tiny-qwen2 reads text: that the run's own model sees (qwen2_vl",
        )
        for mode, argv, key in (("hybrid", GRPO, "actor_rollout_ref.model.lora_rank=8"), ("fully_async", ASYNC, ""))
    ),
    Launch(
        "what vLLM's own kwargs say of lengths",
        "hybrid",
        f"{GRPO} +{R}.engine_kwargs.vllm.max_model_len=4096 {A}.checkpoint.strict=False",
        said="batch:",
    ),
    *(
        Launch(
            f"arguments of a reward manager of one's own, in {section}",
            "hybrid",
            f"{GRPO} +{section}.reward_kwargs.weights.accuracy=1 +{section}.reward_kwargs.judge=x",
            refused=f"'{section}.reward_kwargs.weights.accuracy' (and 1 more) is not supported here: it has max",
        )
        for section in ("reward", "reward_model")
    ),
    Launch(
        "experts cut among ranks",
        "hybrid",
        f"{GRPO} +{R}.moe_tensor_parallel_size=2",
        refused=f"with 2: it is TensorRT-LLM's: leave it out; experts are dealt out by {R}.expert_parallel_size",
    ),
    Launch(
        "a limit of each turn",
        "hybrid",
        f"{GRPO} {R}.single_turn_response_length=99",
        refused="data.max_response_length is of all turns together",
    ),
    Launch(
        "an environment of workers",
        "hybrid",
        f"{GRPO} +trainer.worker_env.A=b",
        refused="set it in ray_kwargs.ray_init.runtime_env.env_vars",
    ),
    Launch("that environment", "hybrid", f"{GRPO} +ray_kwargs.ray_init.runtime_env.env_vars.A=b", said="batch:"),
    Launch("no column of pictures", "hybrid", f"{GRPO} data.image_key=''", said="batch:"),
    Launch(
        "how pictures are read",
        "hybrid",
        f"{GRPO} +data.mm_processor_kwargs.max_pixels=200704",
        said="batch:",
    ),
    Launch(
        "how videos are read",
        "hybrid",
        f"{GRPO} +data.mm_processor_kwargs.fps=2",
        said="batch:",
    ),
    Launch(
        "how videos are read in two ways",
        "hybrid",
        f"{GRPO} +data.mm_processor_kwargs.fps=2 +data.mm_processor_kwargs.num_frames=8",
        refused="data.mm_processor_kwargs: give fps, or num_frames, and not both",
    ),
    Launch("a frozen tower", "hybrid", f"{GRPO} {A}.freeze_vision_tower=True", said="batch:"),
    Launch(
        "many keys of an engine that is not here",
        "hybrid",
        f"{GRPO} {A}.veomni.fsdp_size=4 {A}.veomni.param_offload=True {F}.veomni.param_offload=True",
        refused=f"'{A}.veomni.fsdp_size' (and 2 more) is not supported here: training engines are fsdp, fsdp2",
    ),
    Launch(
        "an engine of plans",
        "hybrid",
        f"{GRPO} +{A}.fsdp_config.turbo_config.memory.recompute=True +{A}.engine.tp=2",
        refused="training engines are fsdp, fsdp2",
    ),
    Launch("a typing mistake", "hybrid", f"{GRPO} trainer.nnode=2", refused="Did you mean 'trainer.nnodes'?"),
)


def check(launch: Launch) -> tuple[int, str, list[str]]:
    """Exit code, what was printed, and the errors."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_hydra(lambda config: None, ["--check", *launch.argv.split()], **MODES[launch.mode])
        except SystemExit as exc:
            code = int(exc.code or 0)
    return code, out.getvalue(), [line for line in err.getvalue().splitlines() if line.startswith("error")]


def main() -> None:
    accepted: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for launch in LAUNCHES:
        code, _, errors = check(launch)
        total[launch.mode] += 1
        accepted[launch.mode] += code == 0
        if (code != 0) != bool(launch.refused):
            print(f"{launch.name}: {code} {errors}")
    for mode, count in total.items():
        print(f"{mode}: {accepted[mode]} of {count} accepted")


if __name__ == "__main__":
    main()
