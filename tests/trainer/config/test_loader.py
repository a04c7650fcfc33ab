from functools import reduce

import pytest

from verl.checkpoint_engine.registry import backend_of_device
from verl.trainer.config.followers import OF_BUILTIN
from verl.trainer.config.from_verl.rules import known_to_verl
from verl.trainer.config.loader import load_config, merge_checkpoint_engine
from verl.trainer.config.schema import keys
from verl.utils.config import ConfigError, to_mapping
from verl.workers.config import PPOConfig

ALIAS = "actor_rollout_ref.rollout.checkpoint_engine"


def with_sections(top, alias):
    values = to_mapping(PPOConfig())
    values["checkpoint_engine"] |= top
    values["actor_rollout_ref"]["rollout"]["checkpoint_engine"] = alias
    return values


@pytest.mark.parametrize(
    ("top", "alias", "explicit", "expected"),
    [
        ({}, {}, (), {"backend": "naive"}),
        ({}, {"backend": "nixl"}, (), {"backend": "nixl"}),
        ({"backend": "nixl"}, {"backend": "nixl"}, (), {"backend": "nixl"}),
        ({"backend": "nixl"}, {"retries": 3}, (), {"backend": "nixl", "retries": 3}),
        ({}, {"backend": "naive"}, ("checkpoint_engine.backend",), {"backend": "naive"}),
        ({}, {"deadlines": {"stage_s": 9}}, (), {}),
        (
            {"engine_kwargs": {"nixl": {"a": 1}}},
            {"engine_kwargs": {"nixl": {"b": 2}}},
            (),
            {"engine_kwargs": {"nixl": {"a": 1, "b": 2}}},
        ),
    ],
)
def test_verls_place_of_the_checkpoint_engine_section_is_merged(top, alias, explicit, expected):
    merged = merge_checkpoint_engine(with_sections(top, alias), explicit)
    assert {key: merged["checkpoint_engine"][key] for key in expected} == expected
    assert not merged["actor_rollout_ref"]["rollout"].get("checkpoint_engine")
    if "deadlines" in alias:
        assert merged["checkpoint_engine"]["deadlines"] == {
            **to_mapping(PPOConfig().checkpoint_engine.deadlines),
            "stage_s": 9,
        }


@pytest.mark.parametrize(
    ("top", "alias", "explicit"),
    [
        ({"backend": "nixl"}, {"backend": "gloo"}, ()),
        ({}, {"backend": "gloo"}, ("checkpoint_engine.backend",)),
        ({"engine_kwargs": {"nixl": {"a": 1}}}, {"engine_kwargs": {"nixl": {"a": 2}}}, ()),
    ],
)
def test_different_values_in_both_places_are_an_error_that_names_both(top, alias, explicit):
    with pytest.raises(ConfigError) as caught:
        merge_checkpoint_engine(with_sections(top, alias), explicit)
    assert "same key" in str(caught.value)
    assert ALIAS in str(caught.value)


def test_merging_leaves_its_argument_as_it_was():
    values = with_sections({}, {"backend": "nixl"})
    merge_checkpoint_engine(values)
    assert values == with_sections({}, {"backend": "nixl"})


def test_the_alias_works_from_the_command_line():
    config = load_config([f"{ALIAS}.backend=nixl", f"{ALIAS}.engine_kwargs.nixl.device=mlx5_0"])
    assert config.checkpoint_engine.backend == "nixl"
    assert config.checkpoint_engine.engine_kwargs == {"nixl": {"device": "mlx5_0"}}
    assert config.actor_rollout_ref.rollout.checkpoint_engine == {}


def test_verls_keys_of_rollout_nodes_are_accepted_at_the_top_level():
    config = load_config(
        ["rollout.n=3", "rollout.nnodes=2", "+rollout.total_rollout_steps=64", "rollout.n_gpus_per_node=1"]
    )
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.n, rollout.nnodes, rollout.n_gpus_per_node) == (3, 2, 1)
    assert config.async_training.total_rollout_steps == 64


def test_a_rollout_key_in_two_places_with_two_values_is_an_error_that_names_both():
    with pytest.raises(ConfigError, match=r"rollout\.n=3 and actor_rollout_ref\.rollout\.n=4 are the same key"):
        load_config(["rollout.n=3", "actor_rollout_ref.rollout.n=4"])
    assert load_config(["rollout.n=3", "actor_rollout_ref.rollout.n=3"]).actor_rollout_ref.rollout.n == 3


@pytest.mark.parametrize(("device", "backend"), [("cuda", "nccl"), ("npu", "hccl"), ("cpu", "gloo")])
def test_every_device_has_a_backend_of_its_own(device, backend):
    assert backend_of_device(device) == backend


def test_a_device_without_one_is_an_error_that_lists_those_that_have():
    with pytest.raises(ConfigError, match="'tpu'; known: cuda, npu, cpu"):
        backend_of_device("tpu")


def test_auto_is_the_backend_of_the_runs_device():
    config = load_config(["checkpoint_engine.backend=auto", "trainer.device=cpu"])
    assert config.checkpoint_engine.backend == "gloo"


def test_a_yaml_file_of_the_users_own_builds_on_the_built_in_one(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {nnodes: 3}\n")
    config = load_config(["trainer.n_gpus_per_node=5"], config_path=tmp_path, config_name="mine.yaml")
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.trainer.total_epochs) == (3, 5, 30)


def test_a_yaml_file_may_hold_only_what_differs_and_need_not_name_the_defaults(tmp_path):
    (tmp_path / "bare.yaml").write_text("trainer: {nnodes: 3}\n")
    config = load_config(["data.train_batch_size=8"], config_path=tmp_path, config_name="bare")
    assert (config.trainer.nnodes, config.data.train_batch_size) == (3, 8)


def test_an_unknown_key_in_a_yaml_file_is_named_with_its_section(tmp_path):
    (tmp_path / "bad.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {nnode: 3}\n")
    with pytest.raises(ConfigError, match=r"'trainer.nnode'. Did you mean 'trainer.nnodes'"):
        load_config(config_path=tmp_path, config_name="bad")


def test_a_configuration_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"a: \x80")
    with pytest.raises(ConfigError, match=r"mine\.yaml cannot be read: .*decode byte 0x80"):
        load_config(config_path=tmp_path, config_name="mine")


def test_a_config_group_of_the_users_own_can_be_chosen(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text("defaults: [legacy_data, _self_]\ntrain_batch_size: 12\n")
    assert load_config(["data=mine"], config_dir=tmp_path).data.train_batch_size == 12


def test_verls_relative_config_path_finds_the_built_in_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(config_path="config") == PPOConfig()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"config_name": "ppo_trainr"}, "no configuration file ppo_trainr.yaml.*Did you mean 'ppo_trainer'"),
        ({"config_path": "/does/not/exist"}, "--config-path=/does/not/exist: no such directory"),
        ({"config_dir": "/does/not/exist"}, "--config-dir=/does/not/exist: no such directory"),
    ],
)
def test_a_file_or_directory_that_is_not_there_is_named(where, message):
    with pytest.raises(ConfigError, match=message):
        load_config(**where)


def test_a_yaml_file_that_cannot_be_parsed_is_named(tmp_path):
    (tmp_path / "broken.yaml").write_text("trainer: [\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_config(config_path=tmp_path, config_name="broken")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ("grpo", 8)),
        (["data.train_files=builtin:arithmetic"], ("grpo", 8)),
        (["actor_rollout_ref.model.path=/models/qwen"], ("gae", 1)),
        (["data.train_files=/data/train.parquet"], ("gae", 1)),
        (["data.train_files=[/data/a.parquet,/data/b.parquet]"], ("gae", 1)),
        (["data.train_files=/data/train.parquet", "actor_rollout_ref.rollout.n=4"], ("gae", 4)),
        (["data.train_files=/data/train.parquet", "algorithm.adv_estimator=rloo"], ("rloo", 1)),
        (["actor_rollout_ref.rollout.n=2", "algorithm.adv_estimator=gae"], ("gae", 2)),
    ],
    ids=str,
)
def test_who_brings_a_model_or_data_has_verls_defaults_of_what_decides_how_it_learns(overrides, expected):
    config = load_config(overrides)
    assert (config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n) == expected


BUILTIN_JOB = {"train_batch_size": 64, "max_prompt_length": 64, "max_response_length": 16, "mini": 64, "test_freq": 10}
VERLS = {"train_batch_size": 1024, "max_prompt_length": 512, "max_response_length": 512, "mini": 256, "test_freq": -1}
OWN_MODEL = "actor_rollout_ref.model.path=/models/qwen"
OWN_DATA = "data.train_files=/data/train.parquet"


@pytest.mark.parametrize(
    ("overrides", "expected", "val_files"),
    [
        ([], BUILTIN_JOB, "builtin:arithmetic"),
        (["data.train_files=[builtin:arithmetic]", "data.max_prompt_length=null"], BUILTIN_JOB, "builtin:arithmetic"),
        ([OWN_MODEL], VERLS, "builtin:arithmetic"),
        ([OWN_DATA], VERLS, []),
        ([OWN_DATA, OWN_MODEL, "data.val_files=/data/test.parquet"], VERLS, "/data/test.parquet"),
        (
            [OWN_DATA, "data.max_response_length=16", "actor_rollout_ref.actor.ppo_mini_batch_size=64"],
            VERLS | {"max_response_length": 16, "mini": 64},
            [],
        ),
    ],
    ids=str,
)
def test_who_brings_a_model_or_data_has_no_sizes_of_the_built_in_job(overrides, expected, val_files):
    config = load_config(overrides)
    data, actor = config.data, config.actor_rollout_ref.actor
    found = {name: getattr(data, name) for name in ("train_batch_size", "max_prompt_length", "max_response_length")}
    assert found | {"mini": actor.ppo_mini_batch_size, "test_freq": config.trainer.test_freq} == expected
    assert data.val_files == val_files


def test_verls_own_defaults_are_those_that_others_get():
    own = load_config([OWN_DATA, OWN_MODEL])
    for path in OF_BUILTIN:
        assert reduce(getattr, path.split("."), own) == known_to_verl()[path][0]
        assert keys()[path].default is None


def test_budgets_are_raised_to_the_longest_sequence_of_who_brings_data():
    split = "actor_rollout_ref.actor.megatron.context_parallel_size=2"
    budget = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=700"
    config = load_config([OWN_DATA, OWN_MODEL, split, budget, "actor_rollout_ref.actor.strategy=megatron"])
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 1024
