from dataclasses import replace

import pytest

from verl.trainer.config.checks.algorithms import warnings
from verl.trainer.config.checks.determinism import full_determinism
from verl.trainer.config.loader import load_config, resolve_config
from verl.trainer.config.validate import possible_fewer_ranks, validate
from verl.utils.config import ConfigError
from verl.workers.config import PPOConfig


def problems(*overrides):
    with pytest.raises(ConfigError) as caught:
        validate(load_config(list(overrides)))
    return str(caught.value).splitlines()


def test_the_defaults_fit_together():
    validate(PPOConfig())


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            [
                "data.train_batch_size=5",
                "actor_rollout_ref.actor.ppo_mini_batch_size=1",
                "actor_rollout_ref.rollout.n=1",
            ],
            ["ppo_mini_batch_size=1 * actor_rollout_ref.rollout.n=1 = 1 sequences are fewer than 2 trainer ranks"],
        ),
        (
            ["actor_rollout_ref.actor.ppo_mini_batch_size=48"],
            ["ppo_mini_batch_size=48 does not divide data.train_batch_size=64"],
        ),
        (
            ["actor_rollout_ref.ref.log_prob_use_dynamic_bsz=false"],
            ["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu must be set"],
        ),
        (
            ["trainer.nnodes=2", "trainer.placement=separate"],
            ["backend=naive needs rollout engines on the trainer's machines", "trainer.nnodes=2 on cpu"],
        ),
        (
            ["actor_rollout_ref.actor.profiler.enable=true", "actor_rollout_ref.actor.profiler.all_ranks=true"],
            ["needs global_profiler.tool=torch and global_profiler.steps"],
        ),
        (
            [
                "global_profiler.tool=torch",
                "global_profiler.steps=[2]",
                "actor_rollout_ref.actor.profiler.enable=true",
            ],
            ["profiler.enable=true needs actor_rollout_ref.actor.profiler.all_ranks=true, or ranks"],
        ),
        (
            [
                "global_profiler.tool=torch",
                "global_profiler.steps=[2]",
                "actor_rollout_ref.actor.profiler.enable=true",
                "actor_rollout_ref.actor.profiler.ranks=[1,2]",
            ],
            ["profiler.ranks=[1, 2]: no rank 2 among 2"],
        ),
        (
            [
                "global_profiler.tool=torch",
                "global_profiler.steps=[2,9]",
                "actor_rollout_ref.actor.profiler.enable=true",
                "actor_rollout_ref.actor.profiler.ranks=[0]",
                "trainer.total_training_steps=8",
            ],
            ["global_profiler.steps=[2, 9]: the run has 8 steps"],
        ),
        (
            ["global_profiler.steps=[0]"],
            ["global_profiler.steps[0] must be at least 1, not 0"],
        ),
        (
            [
                "global_profiler.tool=nsys",
                "global_profiler.steps=[2]",
                "actor_rollout_ref.actor.profiler.enable=true",
                "actor_rollout_ref.actor.profiler.all_ranks=true",
                "trainer.device=cpu",
            ],
            ["global_profiler.tool=nsys traces cuda, not trainer.device=cpu"],
        ),
        (
            ["checkpoint_engine.engine_kwargs.naive.bucket=1"],
            ["unknown configuration key 'checkpoint_engine.engine_kwargs.naive.bucket'"],
        ),
        (["actor_rollout_ref.rollout.max_model_len=20"], ["max_model_len=20", "= 80"]),
        (["actor_rollout_ref.rollout.response_length=20"], ["response_length=20", "max_response_length=16"]),
        (["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=70"], ["ppo_max_token_len_per_gpu=70", "= 80"]),
        (
            ["actor_rollout_ref.model.require_remove_padding=true"],
            ["actor_rollout_ref.model: require_remove_padding=true needs use_remove_padding=true"],
        ),
        (
            [
                "actor_rollout_ref.model.use_remove_padding=true",
                "actor_rollout_ref.model.require_remove_padding=true",
                "actor_rollout_ref.actor.strategy=megatron",
            ],
            ["actor_rollout_ref.model.require_remove_padding=true is for fsdp and fsdp2"],
        ),
        (["algorithm.kl_ctrl.type=adaptive"], ["algorithm.use_kl_in_reward=false"]),
        (
            ["algorithm.rollout_correction.rollout_is=token", "actor_rollout_ref.rollout.calculate_log_probs=false"],
            ["rollout_is=token needs actor_rollout_ref.rollout.calculate_log_probs=true"],
        ),
        (
            ["algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=1"],
            ["actor_rollout_ref.rollout.n=1 must be at least 2"],
        ),
        (
            ["actor_rollout_ref.actor.fsdp_config.fsdp_size=3", "trainer.n_gpus_per_node=4"],
            ["fsdp_size=3 does not divide 4 trainer ranks"],
        ),
        (
            ["actor_rollout_ref.rollout.data_parallel_size=4", "actor_rollout_ref.rollout.expert_parallel_size=2"],
            [
                "expert_parallel_size=2",
                "data_parallel_size=4",
                "set it to 1 (data-parallel ranks are then replicas of their own) or 4",
                "or data_parallel_size to 2",
            ],
        ),
        (["trainer.min_ranks=2"], ["trainer.min_ranks=2 is not less than 2 trainer ranks"]),
        (["trainer.min_ranks=1", "trainer.max_restarts=0"], ["min_ranks=1 needs trainer.max_restarts of 1 or more"]),
        (
            ["actor_rollout_ref.actor.fsdp_config.fsdp_size=2", "trainer.n_gpus_per_node=4", "trainer.min_ranks=3"],
            ["trainer.min_ranks=3 allows no fewer ranks", "fsdp_size=2 does not divide 3 trainer ranks"],
        ),
        (["custom_reward_function.path=/no/reward.py"], ["custom_reward_function.path=/no/reward.py: no such file"]),
        (["trainer.default_local_dir="], ["trainer.default_local_dir='' is no directory"]),
        (["actor_rollout_ref.model.external_lib=no_such_module"], ["external_lib=no_such_module cannot be imported"]),
        (["algorithm.adv_estimator=grp"], ["algorithm.adv_estimator", "'grp'", "grpo"]),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=vanila"], ["'vanila'", "vanilla"]),
        (["+actor_rollout_ref.rollout.engine_kwargs.vlm.x=1"], ["rollout.engine_kwargs.vlm", "Did you mean 'vllm'"]),
        (["checkpoint_engine.backend=navie"], ["'navie'", "naive"]),
        (["actor_rollout_ref.rollout.name=vlm"], ["'vlm'", "vllm"]),
    ],
)
def test_a_combination_that_cannot_work_is_named_with_its_values(overrides, parts):
    (line,) = problems("trainer.device=cpu", *overrides)
    assert [part for part in parts if part not in line] == []


@pytest.mark.parametrize(
    ("hosts", "each", "least", "possible"),
    [
        (1, 4, 2, [(1, 3), (1, 2)]),
        (3, 2, 1, [(2, 2), (1, 2), (1, 1)]),
        (2, 4, 6, []),
        (2, 2, None, []),
    ],
)
def test_whole_hosts_leave_first_and_then_ranks_of_the_last(hosts, each, least, possible):
    trainer = PPOConfig().trainer
    trainer = replace(trainer, nnodes=hosts, n_gpus_per_node=each, min_ranks=least)
    assert trainer.fewer_ranks == possible


def test_fewer_ranks_are_those_with_which_all_else_goes_together():
    config = load_config(
        ["actor_rollout_ref.actor.fsdp_config.fsdp_size=2", "trainer.n_gpus_per_node=4", "trainer.min_ranks=1"]
    )
    validate(config)
    assert possible_fewer_ranks(config) == [(1, 2)]


def test_all_problems_are_reported_at_once():
    found = problems(
        "checkpoint_engine.backend=navie", "algorithm.adv_estimator=grp", "custom_reward_function.path=/no"
    )
    assert len(found) == 3


def test_a_users_module_may_register_the_name_that_is_looked_up(tmp_path, monkeypatch):
    (tmp_path / "my_estimator.py").write_text(
        "from verl.trainer.ppo.core_algos import register_adv_est\n"
        "@register_adv_est('validate_test_estimator')\n"
        "def mine(token_level_rewards, response_mask, index, config): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    name = "algorithm.adv_estimator=validate_test_estimator"
    validate(load_config([name, "actor_rollout_ref.model.external_lib=my_estimator"]))


@pytest.mark.parametrize(("text", "error"), [("def f(:", "SyntaxError"), ("nobody", "NameError: name 'nobody'")])
def test_an_external_lib_that_cannot_be_run_is_told_with_its_error(text, error, tmp_path, monkeypatch):
    (tmp_path / "failing_lib.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"external_lib=failing_lib cannot be imported: {error}"):
        validate(load_config(["actor_rollout_ref.model.external_lib=failing_lib"]))


@pytest.mark.parametrize("sampling", ["top_p=0.9", "top_k=50", "do_sample=false"])
@pytest.mark.parametrize(
    "used",
    ["bypass_mode=true", "rollout_is=token", "rollout_token_veto_threshold=1e-4", "rollout_is=sequence"],
)
def test_probabilities_of_a_truncated_distribution_are_compared_with_others_only_where_that_is_said(sampling, used):
    key, sampled = "algorithm.rollout_correction", f"actor_rollout_ref.rollout.{sampling}"
    chosen = [f"{key}.{used}", "actor_rollout_ref.rollout.calculate_log_probs=true"]
    (problem,) = problems(sampled, *chosen)
    assert used.partition("=")[0] in problem
    assert sampling in problem
    assert f"{key}.accept_truncated_sampling=true" in problem
    validate(load_config([sampled, *chosen, f"{key}.accept_truncated_sampling=true"]))
    validate(load_config([sampled]))
    validate(load_config(chosen))


@pytest.mark.parametrize(("validation", "key"), [((), "do_sample=false"), (("do_sample=true",), "temperature=0.0")])
def test_several_greedy_answers_to_a_question_are_warned_of_once(validation, key):
    chosen = [f"actor_rollout_ref.rollout.val_kwargs.{option}" for option in ("n=4", *validation)]
    (warning,) = warnings(load_config(chosen))
    assert f"val_kwargs.n=4 with {key}" in warning
    sampled = ["do_sample=true", "temperature=0.7"]
    chosen += [f"actor_rollout_ref.rollout.val_kwargs.{option}" for option in sampled]
    assert list(warnings(load_config(chosen))) == []
    assert list(warnings(PPOConfig())) == []


def test_a_group_of_one_is_warned_of_where_its_responses_are_compared():
    (warning,) = warnings(load_config(["actor_rollout_ref.rollout.n=1"]))
    assert "rollout.n=1 with algorithm.adv_estimator=grpo" in warning
    assert list(warnings(load_config(["actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=gae"]))) == []


@pytest.mark.parametrize(
    "key",
    [
        "trainer.default_local_dir",
        "trainer.rollout_data_dir",
        "trainer.validation_data_dir",
        "checkpoint_engine.report_path",
    ],
)
def test_a_place_in_another_storage_is_refused_and_not_made_here(key):
    assert problems(f"{key}=s3://bucket/run") == [
        f"{key}=s3://bucket/run is not a path of this machine: mount that storage, and name the directory"
    ]


def test_keys_of_hydra_itself_are_told_to_do_nothing():
    told = [str(note) for note in resolve_config(["hydra.run.dir=/tmp/x", "hydra.searchpath=[]"]).notes]
    assert told == ["hydra.run.dir=/tmp/x: what a run writes is in trainer.default_local_dir"]


@pytest.mark.parametrize(
    ("override", "needed"),
    [
        ("actor_rollout_ref.rollout.name=hf", "rollout.name=vllm, not hf"),
        ("actor_rollout_ref.rollout.dtype=float32", "rollout.dtype=bfloat16, not float32"),
        ("actor_rollout_ref.rollout.quantization=fp8", "rollout.quantization=None, not fp8"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=1, not 2"),
        ("actor_rollout_ref.rollout.top_p=0.9", "rollout.top_p=1.0, not 0.9"),
        ("actor_rollout_ref.rollout.top_k=50", "rollout.top_k=-1, not 50"),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=64",
            "engine_kwargs.vllm={}, not {'block_size': 64}",
        ),
        ("actor_rollout_ref.actor.strategy=megatron", "actor.strategy=fsdp2 or fsdp, not megatron"),
        ("actor_rollout_ref.actor.fsdp_config.dtype=float32", "actor.fsdp_config.dtype=bfloat16, not float32"),
        ("actor_rollout_ref.model.lora_rank=8", "model.lora_rank=0, not 8"),
        (
            "+actor_rollout_ref.model.override_config.attn_implementation=eager",
            "override_config.attn_implementation=verl_exact, not eager",
        ),
    ],
)
def test_what_keeps_engine_and_trainer_from_the_same_bits_is_refused(override, needed):
    found = problems("actor_rollout_ref.rollout.exact=true", "trainer.device=cpu", override)
    assert any("actor_rollout_ref.rollout.exact=true needs" in line and line.endswith(needed) for line in found)


@pytest.mark.parametrize(
    ("kept", "override", "remedy"),
    [
        ("salt", "actor_rollout_ref.rollout.name=hf", "rollout.name=vllm, not hf"),
        ("salt", "actor_rollout_ref.rollout.enable_prefix_caching=false", "enable_prefix_caching=true"),
        ("salt", "actor_rollout_ref.rollout.exact=true", "kv_across_versions=clear"),
        ("salt", "actor_rollout_ref.rollout.enable_rollout_routing_replay=true", "needs clear"),
        ("salt", "checkpoint_engine.pause_mode=keep", "say so with keep"),
        ("keep", "checkpoint_engine.pause_mode=wait", "pause_mode=keep, not wait"),
    ],
)
def test_caches_are_kept_across_versions_only_where_that_is_recorded(kept, override, remedy):
    found = problems(f"actor_rollout_ref.rollout.kv_across_versions={kept}", override)
    assert any(f"kv_across_versions={kept}" in line and remedy in line for line in found)


def test_the_trainer_has_the_engines_attention_where_both_shall_be_exact():
    config = load_config(["actor_rollout_ref.rollout.exact=true", "trainer.device=cpu"])
    validate(config)
    assert config.actor_rollout_ref.model.override_config == {"attn_implementation": "verl_exact"}


DETERMINED = ("trainer.full_determinism=true", "trainer.device=cpu")


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor_rollout_ref.rollout.exact=true",),
        ("actor_rollout_ref.rollout.max_num_seqs=1", "actor_rollout_ref.rollout.enable_prefix_caching=false"),
        ("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.max_num_seqs=1"),
    ],
)
def test_two_runs_can_be_one_where_nothing_beside_a_sample_rounds_it(overrides):
    config = load_config([*DETERMINED, *overrides])
    validate(config)
    assert config.actor_rollout_ref.rollout.full_determinism


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((), "needs actor_rollout_ref.rollout.exact=true, or actor_rollout_ref.rollout.max_num_seqs=1 and enable_pre"),
        (("actor_rollout_ref.rollout.max_num_seqs=1",), "enable_prefix_caching=false"),
        (("actor_rollout_ref.rollout.name=hf",), "needs actor_rollout_ref.rollout.max_num_seqs=1: "),
        (("actor_rollout_ref.rollout.exact=true", "trainer.min_ranks=1"), "trainer.min_ranks=1: fewer ranks sum in"),
        (("actor_rollout_ref.rollout.exact=true", "reward_model.enable=true"), "reward_model.enable=true"),
    ],
)
def test_what_keeps_two_runs_from_being_one_is_refused(overrides, told):
    assert any(
        line.startswith("trainer.full_determinism=true") and told in line for line in problems(*DETERMINED, *overrides)
    )


def test_an_engine_without_seeds_per_request_is_refused_also_where_it_is_not_installed():
    config = load_config([*DETERMINED, "actor_rollout_ref.rollout.name=sglang"])
    found = list(full_determinism(config))
    assert any("rollout.name=vllm or hf: sglang takes no seed per request" in line for line in found)


def test_an_engine_is_not_determined_where_the_run_is_not():
    (found,) = problems("actor_rollout_ref.rollout.full_determinism=true", "trainer.device=cpu")
    assert "follows trainer.full_determinism=true" in found
