"""What the user wrote wrongly is told in one message, before any process starts, with exit code 2."""

import importlib.machinery
import json
import os
import re
import shutil
import subprocess
import sys
from functools import wraps
from importlib.util import find_spec
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from tests.e2e.job import QUICK, in_process
from tests.models.architectures import ARCHITECTURES, write_checkpoint
from verl.checkpoint_engine import registry
from verl.checkpoint_engine.errors import ConfigError
from verl.trainer.config.cli import run_hydra
from verl.trainer.config.loader import load_config
from verl.trainer.ppo import requirements
from verl.trainer.ppo.run import train
from verl.utils import config as config_errors
from verl.workers.reward_manager.naive import RewardError

pytestmark = pytest.mark.e2e

MEGATRON = "actor_rollout_ref.actor.strategy=megatron"


@pytest.fixture
def refuse(tmp_path, tiny_model, monkeypatch, capsys):
    """Runs the trainer with overrides that it must refuse; its message, one line per mistake."""

    @wraps(ray.init)
    def start_ray(*_, **__):
        pytest.fail("Ray was started")

    monkeypatch.setattr(ray, "init", start_ray)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # other tests of the session have one

    def run(*overrides):
        with pytest.raises(SystemExit) as caught:
            run_hydra(
                train,
                [
                    *QUICK,
                    f"actor_rollout_ref.model.path={tiny_model}",
                    f"trainer.default_local_dir={tmp_path / 'out'}",
                    *overrides,
                ],
            )
        assert caught.value.code == 2
        output = capsys.readouterr()
        assert output.out == ""
        lines = output.err.splitlines()
        assert all(line.startswith("error: ") for line in lines), lines
        assert not (tmp_path / "out/metrics.jsonl").exists()
        return [line.removeprefix("error: ") for line in lines]

    return run


@pytest.fixture
def parquet(tmp_path):
    def write(questions, **columns):
        rows = {
            "data_source": ["builtin/arithmetic"] * len(questions),
            "prompt": [[{"role": "user", "content": question}] for question in questions],
            "reward_model": [{"style": "rule", "ground_truth": "2"}] * len(questions),
        } | columns
        path = tmp_path / "data.parquet"
        pq.write_table(pa.table({name: values for name, values in rows.items() if values is not None}), path)
        return path

    return write


LORA = "actor_rollout_ref.model.lora_rank=4"
ADAPTERS = "actor_rollout_ref.model.lora.merge=false"
VLLM = "actor_rollout_ref.rollout.name=vllm"
EXPERTS = "actor_rollout_ref.model.path=builtin:tiny-qwen3-moe"
MISTAKES = [
    (["actor_rollout_ref.rollout.temprature=1"], ["actor_rollout_ref.rollout.temprature", "temperature"]),
    (["checkpoint_engine.backend=navie"], ["'navie'", "Did you mean 'naive'"]),
    (["actor_rollout_ref.rollout.name=vlm"], ["'vlm'", "vllm"]),
    (
        ["actor_rollout_ref.actor.strategy=fdsp"],
        ["strategy='fdsp'", "Did you mean 'fsdp'?", "Known: fsdp, fsdp2, megatron"],
    ),
    (["actor_rollout_ref.actor.strategy=megatro"], ["strategy='megatro'", "'megatron'"]),
    (
        [MEGATRON, "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2"],
        ["expert_model_parallel_size=2", "no experts"],
    ),
    (
        [MEGATRON, "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2"],
        ["actor_rollout_ref.ref.megatron", "tensor_model_parallel_size=2 differs", "leave it null"],
    ),
    (["algorithm.adv_estimator=gae", "critic.enable=false"], ["adv_estimator=gae needs a critic", "enable=false"]),
    (["critic.enable=true"], ["critic.enable=true", "adv_estimator=grpo", "gae"]),
    (["trainer.critic_warmup=3"], ["trainer.critic_warmup=3", "adv_estimator=grpo"]),
    (
        [
            "algorithm.adv_estimator=gae",
            "critic.strategy=megatron",
            "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
        ],
        ["actor_rollout_ref.actor.megatron.expert_model_parallel_size=2", "no experts"],
    ),
    (["critic.strategy=fdsp"], ["critic.strategy='fdsp' is not one of: fsdp2, megatron"]),
    (["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=3"], ["critic.ppo_mini_batch_size=3", "=4"]),
    (
        ["algorithm.adv_estimator=gae", "critic.model.path=/no/critic"],
        ["critic.model.path='/no/critic' is not a directory"],
    ),
    (
        ["reward_model.enable=true", "reward_model.model.path=/no/rm"],
        ["reward_model.model.path='/no/rm' is not a directory"],
    ),
    ([LORA, "actor_rollout_ref.actor.strategy=fsdp"], ["lora_rank=4", "strategy=fsdp2", "not fsdp,"]),
    ([LORA, ADAPTERS], ["lora.merge=false", "rollout.name=hf does not", "rollout.name=vllm"]),
    ([LORA, MEGATRON, "actor_rollout_ref.model.target_modules=.*0.self_attn.q_proj"], ["q_proj of some blocks"]),
    ([LORA.replace("4", "513"), ADAPTERS, VLLM], ["lora_rank=513 is more than 64, the highest rank"]),
    ([LORA, ADAPTERS, VLLM, EXPERTS], ["merge=false", "vLLM on cpu", "qwen3_moe, a mixture of experts", "merge=true"]),
    ([VLLM, "actor_rollout_ref.rollout.engine_kwargs.vllm.enable_lora=true"], ["enable_lora", "model.lora.merge"]),
    ([LORA, "actor_rollout_ref.model.target_modules=[q_prj]"], ["target_modules", "q_prj", "not found"]),
    (["algorithm.lam=1.5"], ["algorithm.lam must be at least 0 and at most 1, not 1.5"]),
    (["trainer.device=gpu"], ["trainer.device", "gpu", "cpu", "cuda", "npu"]),
    (["trainer.logger=[tensorbord]"], ["tensorbord", "tensorboard"]),
    (["actor_rollout_ref.model.path=/no/model"], ["/no/model", "is not a directory"]),
    (["data.train_files=/no/train.parquet"], ["data.train_files", "/no/train.parquet"]),
    (["data.val_files=[/no/a.parquet,/no/b.parquet]"], ["data.val_files", "/no/a.parquet", "/no/b.parquet"]),
    (["data.train_batch_size=6", "actor_rollout_ref.actor.ppo_mini_batch_size=4"], ["=4", "=6"]),
    (
        ["data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1", "trainer.n_gpus_per_node=4"],
        ["= 2 sequences", "4 trainer ranks"],
    ),
    (["data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32"], ["32", "16 training samples"]),
    (
        [VLLM, "actor_rollout_ref.rollout.cpu_kvcache_gib=1e-6"],
        ["cpu_kvcache_gib=1e-06 does not hold one sequence", "or more"],
    ),
    (["data.max_response_length=600"], ["max_response_length=600", "664", "max_position_embeddings=512"]),
    (
        [
            VLLM,
            "data.max_response_length=600",
            "+actor_rollout_ref.model.override_config.rope_parameters={rope_type:dynamic,factor:4.0,rope_theta:1e4}",
        ],
        [
            "rope_type=dynamic",
            "max_position_embeddings=512",
            "vllm of none",
            "no longer than 512, or set rollout.name=hf",
        ],
    ),
    (
        ["actor_rollout_ref.rollout.max_model_len=100000"],
        ["rollout.max_model_len=100000", "max_position_embeddings=512"],
    ),
    (
        [VLLM, "actor_rollout_ref.rollout.tensor_model_parallel_size=3"],
        ["parallel_size=3 does not divide", "attention heads of"],
    ),
    (["data.max_prompt_length=4"], ["16 of 16 train prompts", "max_prompt_length=4", "filter_overlong_prompts"]),
    (["actor_rollout_ref.model.override_config.hidden_sise=3"], ["hidden_sise", "hidden_size"]),
    (["actor_rollout_ref.rollout.temperature=0"], ["temperature=0", "above 0"]),
    (["actor_rollout_ref.rollout.agent.default_agent_loop=single_turn"], ["'single_turn'", "single_turn_agent"]),
    (["actor_rollout_ref.rollout.engine_kwargs.vlm.x=1"], ["engine_kwargs.vlm", "vllm"]),
    (["checkpoint_engine.update_weights_bucket_megabytes=0"], ["bucket_megabytes must be at least 1, not 0"]),
    (["checkpoint_engine.update_weights_bucket_megabytes=0.001"], ["bucket_megabytes", "0.001", "int"]),
    (["checkpoint_engine.engine_kwargs.gloo.bucket_megabytes=0"], ["gloo.bucket_megabytes must be at least 1"]),
    (["checkpoint_engine.backend=gloo", "checkpoint_engine.engine_kwargs.gloo.interface=no0"], ["'no0'", " lo"]),
    (["checkpoint_engine.custom_backend_module=no_such_module"], ["custom_backend_module", "no_such_module"]),
    (["actor_rollout_ref.model.external_lib=no_such_module"], ["external_lib", "no_such_module"]),
    (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/no/step"], ["/no/step", "not a checkpoint"]),
    (["trainer.resume_mode=resume_path"], ["resume_from_path"]),
    (["trainer.rollout_data_dir=/proc/x"], ["trainer.rollout_data_dir=/proc/x is not writable"]),
    (["trainer.validation_data_dir=/proc/x"], ["trainer.validation_data_dir=/proc/x is not writable"]),
    (["checkpoint_engine.report_path=/proc/x/y"], ["the directory of checkpoint_engine.report_path=/proc/x is not"]),
    (["checkpoint_engine.report_path=/tmp"], ["checkpoint_engine.report_path=/tmp is a directory"]),
    (["ray_kwargs.timeline_json_file=/proc/x/y"], ["the directory of ray_kwargs.timeline_json_file=/proc/x is not"]),
    (["ray_kwargs.ray_init.num_cpu=2"], ["ray_kwargs.ray_init.num_cpu", "Did you mean 'num_cpus'"]),
    (["ray_kwargs.ray_init.address=127.0.0.1:1"], ["127.0.0.1:1", "no Ray can be reached there"]),
    (["custom_reward_function.path=/no/reward.py"], ["custom_reward_function.path", "/no/reward.py"]),
]
"""Overrides, and what the message has to say."""


@pytest.mark.parametrize(("overrides", "parts"), MISTAKES, ids=[overrides[-1] for overrides, _ in MISTAKES])
def test_a_mistake_is_told_in_one_message_before_anything_starts(refuse, overrides, parts):
    (message,) = refuse(*overrides)
    assert [part for part in parts if part not in message] == []


@pytest.fixture
def critic_dir(tmp_path, tiny_model):
    """A copy of the policy that a test may change."""
    return shutil.copytree(tiny_model, tmp_path / "critic")


def test_a_critic_that_numbers_tokens_in_another_way_is_refused(refuse, critic_dir):
    file = critic_dir / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    (message,) = refuse("algorithm.adv_estimator=gae", f"critic.model.path={critic_dir}")
    assert f"critic.model.path={critic_dir} has another vocabulary than the policy" in message
    assert "2 of 264 tokens differ, such as 'a'" in message


def test_a_critic_with_too_few_embeddings_is_refused(refuse, critic_dir):
    file = critic_dir / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 200}))
    (message,) = refuse("algorithm.adv_estimator=gae", f"critic.model.path={critic_dir}")
    assert "embeddings for 200 tokens" in message
    assert "has 264 token ids" in message


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="this machine may have the device")
def test_a_device_that_this_machine_does_not_have_is_refused(refuse):
    (message,) = refuse("trainer.device=npu")
    assert "device 'npu' cannot be used here" in message
    assert "verl-sync[npu]" in message


def test_a_backend_whose_package_is_missing_names_the_extra(refuse, monkeypatch):
    far = registry.Backend(target="not_installed_anywhere:Engine", remedy="pip install 'verl-sync[far]'")
    monkeypatch.setitem(registry.BUILTIN, "far", far)
    (message,) = refuse("checkpoint_engine.backend=far")
    assert "'not_installed_anywhere'" in message
    assert "pip install 'verl-sync[far]'" in message


@pytest.mark.parametrize(
    ("backend", "library", "parts"),
    [
        ("nixl", "nixl", ["needs the package 'nixl'", "verl-sync[nixl]"]),
        (
            "mooncake",
            "mooncake",
            ["needs the package 'mooncake", "verl-sync[mooncake]", "apt-get install libibverbs1"],
        ),
        (
            "kimi_ckpt_engine",
            "mooncake",
            ["needs the package 'mooncake", "verl-sync[kimi]", "apt-get install libibverbs1"],
        ),
    ],
)
def test_a_transport_that_is_not_installed_names_the_extra(refuse, without, backend, library, parts):
    without(backend, library, None)
    (message,) = refuse(f"checkpoint_engine.backend={backend}", "trainer.placement=separate")
    assert [part for part in parts if part not in message] == []


def test_a_mooncake_whose_library_does_not_load_names_the_system_libraries(refuse, without):
    without("mooncake", "mooncake.engine", ModuleType("mooncake.engine"))
    (message,) = refuse("checkpoint_engine.backend=mooncake", "trainer.placement=separate")
    assert "cannot load: cannot import name 'TransferEngine'" in message
    assert "apt-get install libibverbs1 libnuma1 libcurl4" in message


@pytest.fixture
def without(monkeypatch):
    """Makes a transport's library missing, or something that does not work."""

    def replace(backend, library, module):
        for name in [name for name in sys.modules if name.startswith(f"{library}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, library, module)
        for name in (backend, library):
            monkeypatch.delitem(sys.modules, f"verl.checkpoint_engine.backends.{name}", raising=False)

    return replace


@pytest.mark.skipif(find_spec("mooncake") is None, reason="mooncake is not installed")
@pytest.mark.parametrize(("backend", "protocol"), [("mooncake", "protocol"), ("kimi_ckpt_engine", "p2p_protocol")])
def test_an_rdma_device_that_does_not_exist_is_told_with_those_that_do(refuse, backend, protocol):
    (message,) = refuse(
        f"checkpoint_engine.backend={backend}",
        "trainer.placement=separate",
        f"checkpoint_engine.engine_kwargs.{backend}.{protocol}=rdma",
        f"checkpoint_engine.engine_kwargs.{backend}.rdma_devices=mlx5_99",
    )
    assert "no RDMA device mlx5_99" in message
    assert "there are: " in message


@pytest.mark.skipif(find_spec("mooncake") is None, reason="mooncake is not installed")
@pytest.mark.parametrize("backend", ["mooncake", "kimi_ckpt_engine"])
@pytest.mark.parametrize(("key", "value"), [("host", "203.0.113.1"), ("interface", "ib7")])
def test_an_address_or_interface_that_this_host_lacks_is_told_with_those_that_it_has(refuse, backend, key, value):
    (message,) = refuse(
        f"checkpoint_engine.backend={backend}",
        "trainer.placement=separate",
        f"checkpoint_engine.engine_kwargs.{backend}.{key}={value}",
    )
    assert value in message
    assert re.search("(there are|its addresses): .*lo", message)


@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
def test_a_device_that_ucx_does_not_have_is_told_with_those_that_it_has(refuse):
    (message,) = refuse(
        "checkpoint_engine.backend=nixl",
        "trainer.placement=separate",
        "checkpoint_engine.engine_kwargs.nixl.ucx_net_devices=mlx5_99:1",
    )
    assert "UCX_NET_DEVICES=mlx5_99:1" in message
    assert "'mlx5_99:1' is not available, please use one or more of: " in message
    assert "'lo'(tcp)" in message


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_a_tracker_whose_package_is_missing_names_the_extra(refuse):
    (message,) = refuse("trainer.logger=[console,wandb]")
    assert "pip install 'verl-sync[wandb]'" in message


def test_a_missing_column_is_named_with_its_file(refuse, parquet):
    path = parquet(["1+1="] * 4, reward_model=None)
    (message,) = refuse(f"data.train_files={path}")
    assert str(path) in message
    assert "'reward_model'" in message


def test_a_model_directory_without_weights_says_so(refuse, tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (message,) = refuse(f"actor_rollout_ref.model.path={tmp_path / 'model'}")
    assert "has no weights" in message


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    """The directory of a model that also sees."""
    write_checkpoint(ARCHITECTURES["mistral3"], directory := tmp_path_factory.mktemp("sees"))
    return directory


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["actor_rollout_ref.rollout.name=vllm"], "is built by vLLM with torchvision, which is not installed"),
        (["actor_rollout_ref.rollout.name=sglang"], "has not been tried with rollout.name=sglang"),
        (["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora.merge=false"], "with lora.merge=false"),
        (["algorithm.adv_estimator=gae"], "is no model for a critic"),
    ],
)
def test_what_the_language_model_in_a_model_that_sees_is_not_trained_with_is_refused(
    sees, monkeypatch, overrides, said
):
    torchvision = None if "torchvision" in said else importlib.machinery.ModuleSpec("torchvision", None)
    monkeypatch.setattr(requirements, "find_spec", lambda name: torchvision)
    config = load_config([f"actor_rollout_ref.model.path={sees}", "algorithm.adv_estimator=grpo", *overrides])
    with pytest.raises(config_errors.ConfigError, match=re.escape(said)) as refusal:
        requirements.require_text_of_wrapper(config)
    assert "mistral3, which is more than a language model" in str(refusal.value)


def test_the_language_model_of_qwen3_5_needs_torchvision_in_vllm_too(tmp_path, monkeypatch):
    write_checkpoint(ARCHITECTURES["qwen3_5_text"], tmp_path)
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    overrides = [f"actor_rollout_ref.model.path={tmp_path}", "algorithm.adv_estimator=grpo"]
    said = "qwen3_5_text is built by vLLM with torchvision, which is not installed"
    with pytest.raises(config_errors.ConfigError, match=said):
        requirements.require_text_of_wrapper(load_config(overrides))
    requirements.require_text_of_wrapper(load_config([*overrides, "actor_rollout_ref.rollout.name=hf"]))


def test_a_critic_is_not_made_of_a_model_that_also_sees(refuse, sees):
    gae = ["actor_rollout_ref.rollout.name=hf", "algorithm.adv_estimator=gae"]
    (message,) = refuse(f"actor_rollout_ref.model.path={sees}", *gae)
    assert "is no model for a critic: set critic.model.path to a language model" in message
    (message,) = refuse(f"critic.model.path={sees}", *gae)
    assert "mistral3 is more than a language model, and no model for a critic" in message


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"


def _edit_config(directory, **fields):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


MODEL_DAMAGE = {
    "truncated": (lambda d: os.truncate(d / "model.safetensors", 5000), ["model.safetensors is truncated", "5000"]),
    "pointer": (lambda d: (d / "model.safetensors").write_text(POINTER), ["model.safetensors is a git-lfs pointer"]),
    "config pointer": (lambda d: (d / "config.json").write_text(POINTER), ["config.json is a git-lfs pointer"]),
    "bin": (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), [".bin files are not read"]),
    "shapes": (lambda d: _edit_config(d, intermediate_size=96), ["does not fit the weights", "in the model, ("]),
    "vocabulary": (lambda d: _edit_config(d, vocab_size=300), ["embed_tokens.weight: (300, ", "in the model, (264, "]),
}


@pytest.mark.parametrize(("damage", "parts"), MODEL_DAMAGE.values(), ids=MODEL_DAMAGE)
def test_a_model_whose_files_are_not_whole_or_not_of_one_model_is_refused(refuse, tiny_model, tmp_path, damage, parts):
    directory = shutil.copytree(tiny_model, tmp_path / "model")
    damage(directory)
    (message,) = refuse(f"actor_rollout_ref.model.path={directory}")
    assert message.startswith("actor_rollout_ref.model.path")
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize("content", [b"{bad", b"\x80", b'{"eos_token_id": "no"}'])
def test_a_generation_config_that_no_engine_could_read_is_refused(refuse, tiny_model, tmp_path, content):
    directory = shutil.copytree(tiny_model, tmp_path / "model")
    (directory / "generation_config.json").write_bytes(content)
    (message,) = refuse(f"actor_rollout_ref.model.path={directory}")
    assert message.startswith(f"{directory / 'generation_config.json'} is damaged: ")


def test_a_tokenizer_of_another_model_is_refused(refuse, tiny_model, tmp_path):
    directory = shutil.copytree(tiny_model, tmp_path / "tokenizer")
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": 264, "content": "<new>"})
    file.write_text(json.dumps(tokenizer))
    (message,) = refuse(f"actor_rollout_ref.model.tokenizer_path={directory}")
    assert "has embeddings for 264 tokens (vocab_size), and its tokenizer 1 ids beyond them, such as 264" in message


def test_a_data_source_without_a_reward_is_refused(refuse, parquet):
    path = parquet(["1+1="] * 4, data_source=["builtin/arithmetic", "my/sums", "my/sums", "my/sums"])
    (message,) = refuse(f"data.train_files={path}")
    assert f"data.train_files: row 1 of {path}: there is no built-in reward for data_source='my/sums'" in message


def test_only_the_prompts_that_are_too_long_are_counted(refuse, parquet):
    path = parquet(["1+1=", "1+1=", "1" * 80, "1" * 90])
    (message,) = refuse(f"data.train_files={path}")
    assert "2 of 4 train prompts are longer than data.max_prompt_length=64" in message


def test_a_file_in_place_of_the_output_directory_is_refused_and_kept(refuse, tmp_path):
    file = tmp_path / "results"
    file.write_text("mine")
    (message,) = refuse(f"trainer.default_local_dir={file}")
    assert f"trainer.default_local_dir={file} is not writable" in message
    assert file.read_text() == "mine"


def test_a_reward_file_without_the_function_names_both(refuse, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def score(): ...\n")
    (message,) = refuse(f"custom_reward_function.path={file}")
    assert str(file) in message
    assert "compute_score" in message


def test_a_tool_class_that_does_not_exist_is_found_before_the_engines_start(refuse, tmp_path):
    file = tmp_path / "tools.yaml"
    file.write_text("tools: [{class_name: 'no_such_module:Tool'}]\n")
    (message,) = refuse(
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={file}",
    )
    assert "no_such_module" in message


def test_a_pointer_to_a_checkpoint_that_is_gone_says_what_to_do(refuse, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/latest_checkpointed_iteration.txt").write_text("7")
    (message,) = refuse()
    assert "global_step_7" in message
    assert "trainer.resume_mode=disable" in message


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_shared_memory_that_is_too_small_is_told_with_both_numbers(refuse, tmp_path, monkeypatch):
    shm = tmp_path / "shm"
    shm.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(shm)], check=False)
    if mounted.returncode:
        pytest.skip("this machine does not allow mounts")
    try:
        monkeypatch.setenv("VERL_SHM_DIR", str(shm))
        (message,) = refuse()
        needed, free = re.search(r"needs (\d+) bytes .* (\d+) bytes .* are free", message).groups()
        assert int(needed) > int(free) == 65536
        (message,) = refuse(
            "checkpoint_engine.backend=gloo", "trainer.placement=separate", "actor_rollout_ref.rollout.nnodes=3"
        )
        assert f"3 node arenas on one host need {3 * int(needed)} bytes" in message
        assert list(shm.iterdir()) == []
    finally:
        subprocess.run(["umount", str(shm)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_rollout_node_that_is_too_small_is_named_before_engines_start_and_arenas_are_made(
    ray_cluster, tmp_path, tiny_model, monkeypatch
):
    """In a Ray that is there already, the driver does not know the machines: they are asked."""
    shm = tmp_path / "shm"
    shm.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(shm)], check=False)
    if mounted.returncode:
        pytest.skip("this machine does not allow mounts")
    try:
        monkeypatch.setenv("VERL_SHM_DIR", str(shm))
        with pytest.raises(ConfigError, match=r"prepare, node-\d.*2 node arenas on one host need \d+ bytes") as raised:
            in_process(
                tmp_path,
                f"actor_rollout_ref.model.path={tiny_model}",
                "trainer.n_gpus_per_node=1",
                "trainer.placement=separate",
                "checkpoint_engine.backend=gloo",
                "actor_rollout_ref.rollout.nnodes=2",
            )
        assert f"in {shm} on " in str(raised.value)
        assert "65536 bytes (0.1 MiB) are free" in str(raised.value)
        assert list(shm.iterdir()) == []
    finally:
        subprocess.run(["umount", str(shm)], check=True)


def test_a_reward_function_that_fails_in_the_middle_of_a_run_names_the_sample(ray_cluster, tmp_path, tiny_model):
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float('nan') if extra_info['index'] == 273 else 1.0\n"
    )
    with pytest.raises(RewardError, match=r"returned nan .* on sample \d \(index 273, uid \w+, data_source"):
        in_process(
            tmp_path,
            f"actor_rollout_ref.model.path={tiny_model}",
            f"custom_reward_function.path={tmp_path / 'reward.py'}",
            "trainer.n_gpus_per_node=1",
            "trainer.total_training_steps=4",
        )
