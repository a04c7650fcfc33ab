from pathlib import Path

import pytest
import yaml

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.trainer.config.from_verl.keys import RULES
from verl.trainer.config.loader import load_config
from verl.trainer.config.schema import keys
from verl.utils.config import ConfigError, from_mapping
from verl.workers.config import HFModelConfig
from verl.workers.config.critic import CriticModelConfig

SECTIONS = ("trainer", "data", "algorithm", "checkpoint_engine", "reward_model", "actor_rollout_ref.actor.optim")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.nnode=2", "unknown configuration key 'trainer.nnode'. Did you mean 'trainer.nnodes'?"),
        (
            "actor.optim.lr=1",
            "unknown configuration key 'actor.optim.lr'. Did you mean 'actor_rollout_ref.actor.optim.lr'?",
        ),
        ("train_batch_size=8", "unknown configuration key 'train_batch_size'. Did you mean 'data.train_batch_size'?"),
        ("trainer.ppo_epochs=2", "'actor_rollout_ref.actor.ppo_epochs'"),
        ("data={train_batch_siz: 3}", "unknown configuration key 'data.train_batch_siz'"),
        ("trainer.nnodes.x=1", "'trainer.nnodes' is a value, not a section."),
        ("zzz=1", "unknown configuration key 'zzz'. See --help"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backnd=x", "Did you mean 'checkpoint_engine.backend'?"),
        ("trainer.nnodes=x", "trainer.nnodes takes an integer, not 'x'"),
        ("trainer.default_local_dir=None", "trainer.default_local_dir=None: None is a word here; write null"),
        ("trainer.max_actor_ckpt_to_keep=None", "trainer.max_actor_ckpt_to_keep=None: None is a word here"),
        ("trainer.experiment_name=", "trainer.experiment_name='' is a part of the output directory"),
        ("trainer.experiment_name=../x", "trainer.experiment_name='../x' is a part of the output directory"),
        ("trainer.seed=null", "trainer.seed takes an integer, not None"),
        ("data.truncation=lefty", "data.truncation='lefty' is not one of: error, left, right, middle"),
        ("data.custom_cls=3", "data.custom_cls is a section of keys"),
        ("checkpoint_engine.deadlines.stage_s=-1", "deadlines.stage_s must be above 0, not -1"),
        (" ", "' ' is no key=value: a backslash with a blank behind it"),
        ("trainer.nnodes", "malformed override 'trainer.nnodes': write key=value"),
        ("=3", "malformed override '=3'"),
        ("data.train_files=/a (b)/c", "two pairs of quotes: 'data.train_files=\"/a (b)/c\"'"),
        (
            'ray_kwargs.ray_init={"address": "auto"}',
            "'ray_kwargs.ray_init={a: 1, b: [2, 3], c: \"two words\"}', its keys",
        ),
        ("trainer.nnodes=1,2", "has several values"),
        (
            "data=foo",
            "data is a section of keys, and no file data/foo.yaml has values for it (files: legacy",
        ),
        ("checkpoint_engine=naive", "To set one of its keys: checkpoint_engine.backend=naive"),
        *((f"{section}=null", f"{section} is a section of keys; it cannot be set to null") for section in SECTIONS),
        *((f"{section}=7", f"{section} is a section of keys; it cannot be set to 7") for section in SECTIONS),
        ("trainer=[1]", "trainer is a section of keys; it cannot be set to [1]"),
        (
            "+trainer.foo=1",
            "unknown configuration key 'trainer.foo'. See --help trainer for its keys. A leading + adds",
        ),
        ("+trainer.loger=1", "Did you mean 'trainer.logger'? A leading + adds no new keys."),
        ("reward_model.rollout.name=trtllm", "reward_model.rollout.name='trtllm' is not one of: vllm, sglang"),
        ("global_profiler.tool=perf", "global_profiler.tool='perf' is not one of: null, torch, torch_memory, nsys"),
        ("trainer.logger=null", "trainer.logger takes a list, not null"),
        ("data.seed=${foo}", "data.seed: Interpolation key 'foo' not found"),
        ("data.seed=???", "data.seed"),
        ("critic.model.lora_rank=8", "verl key 'critic.model.lora_rank' is not supported here with 8: the critic is"),
        (
            "async_training.use_trainer_do_validate=true",
            "is not supported here with true: the rollout engines validate",
        ),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode", "rollout_correction.bypass_mode=true: set that"),
        ("algorithm.rollout_correction.rollout_rs=token", "algorithm.rollout_correction: rollout_rs=token_k1 needs"),
    ],
)
def test_what_cannot_be_set_is_one_line_that_says_why(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_unknown_keys_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        load_config(["trainer.loger=x", "data.seed=3", "zork=3", "data=null"])
    first, second, third = str(caught.value).splitlines()
    assert "'trainer.loger'" in first
    assert "'zork'" in second
    assert third == "data is a section of keys; it cannot be set to null"


@pytest.mark.parametrize("path", ["~/a.parquet", "/data/Übung.parquet", "数据/train.parquet"])
def test_paths_need_no_quotes_for_a_tilde_or_letters_of_any_language(path):
    config = load_config([f"data.train_files={path}", f"data.val_files={path}"])
    assert config.data.train_files == str(Path(path).expanduser())


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("trainer.logger=console", lambda config: config.trainer.logger, ["console"]),
        ("global_profiler.steps=3", lambda config: config.global_profiler.steps, [3]),
        ("actor_rollout_ref.actor.profiler.ranks=0", lambda config: config.actor_rollout_ref.actor.profiler.ranks, [0]),
    ],
)
def test_one_value_is_a_list_of_one(override, read, value):
    assert read(load_config([override])) == value


@pytest.mark.parametrize("prefix", ["", "+", "++"])
@pytest.mark.parametrize(
    ("section", "read"),
    [
        ("actor_rollout_ref.rollout.engine_kwargs", lambda config: config.actor_rollout_ref.rollout.engine_kwargs),
        ("actor_rollout_ref.model.override_config", lambda config: config.actor_rollout_ref.model.override_config),
        ("ray_kwargs.ray_init", lambda config: config.ray_kwargs.ray_init),
        ("data.apply_chat_template_kwargs", lambda config: config.data.apply_chat_template_kwargs),
        ("checkpoint_engine.engine_kwargs", lambda config: config.checkpoint_engine.engine_kwargs),
    ],
)
def test_free_form_sections_take_new_keys_with_and_without_plus(prefix, section, read):
    assert read(load_config([f"{prefix}{section}.some.key=3"])) == {"some": {"key": 3}}


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("actor_rollout_ref.actor.optim.lr=3e-4", lambda c: c.actor_rollout_ref.actor.optim.lr, 3e-4),
        ("+trainer.nnodes=2", lambda c: c.trainer.nnodes, 2),
        ("data.train_files=[a.parquet,b.parquet]", lambda c: c.data.train_files, ["a.parquet", "b.parquet"]),
        ("data={train_batch_size: 8}", lambda c: (c.data.train_batch_size, c.data.seed), (8, 1)),
        ('trainer.logger=["console"]', lambda c: c.trainer.logger, ["console"]),
        ("data.val_files=${data.train_files}", lambda c: c.data.val_files, "builtin:arithmetic"),
        ("~trainer.nnodes", lambda c: c.trainer.nnodes, 1),
        ("actor@actor_rollout_ref.actor=dp_actor", lambda c: c.actor_rollout_ref.actor.ppo_epochs, 1),
        ("hydra.run.dir=/nowhere", lambda c: c.trainer.nnodes, 1),
    ],
)
def test_values_arrive_with_their_types(override, read, value):
    assert read(load_config([override])) == value


def test_no_key_that_exists_is_listed_as_one_of_verl_that_does_not():
    assert [key for key in RULES if key in keys()] == []


CORRECTION = "algorithm.rollout_correction"


def test_two_bounds_under_an_older_name_of_a_rejection_are_refused_with_those_to_write():
    given = [f"{CORRECTION}.rollout_rs=geometric", f"{CORRECTION}.rollout_rs_threshold=0.8_1.25"]
    with pytest.raises(ConfigError, match="rollout_rs=seq_mean_k1 and .*_threshold=0.8_1.25"):
        load_config(given)
    with pytest.raises(ConfigError, match="_threshold=0.5_4"):
        load_config([given[0], f"{CORRECTION}.rollout_rs_threshold=0.25_2.0"])
    with pytest.raises(ConfigError, match="rollout_rs=token: an older release's name"):
        load_config([f"{CORRECTION}.rollout_rs=token", f"{CORRECTION}.rollout_rs_threshold=0.25_2.0"])
    one = load_config([given[0], f"{CORRECTION}.rollout_rs_threshold=1.25"]).algorithm.rollout_correction
    assert one.rejections == (("seq_mean_k1", 0.8, 1.25),)


def test_verls_names_of_a_floor_and_of_the_loss_of_bypass_mode_are_taken():
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode"
    actor = load_config([loss, f"{CORRECTION}.bypass_mode=true"]).actor_rollout_ref.actor
    assert (actor.policy_loss.loss_mode, actor.use_rollout_log_probs) == ("vanilla", True)
    floor = load_config(["actor_rollout_ref.actor.optim.min_lr_factor=0.25", "critic.optim.min_lr_factor=0.5"])
    assert (floor.actor_rollout_ref.actor.optim.min_lr_ratio, floor.critic.optim.min_lr_ratio) == (0.25, 0.5)


@pytest.mark.parametrize("written", ["off", "Off", "'off'", "false"])
@pytest.mark.parametrize(
    ("section", "name"),
    [(HFModelConfig, "dropout"), (CriticModelConfig, "dropout"), (CheckpointEngineConfig, "check_engine")],
)
def test_off_without_quotes_is_off_although_yaml_reads_it_as_false(section, name, written):
    values = yaml.safe_load(f"{name}: {written}")
    assert getattr(from_mapping(section, values), name) == "off"


@pytest.mark.parametrize("written", ["true", "on", "0", "null"])
def test_other_values_are_not_taken_for_off(written):
    with pytest.raises(ConfigError, match="dropout"):
        from_mapping(HFModelConfig, yaml.safe_load(f"dropout: {written}"))
