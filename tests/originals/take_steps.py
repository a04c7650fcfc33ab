"""Metrics of whole training steps by PyPI's verl, on one rank and the CPU: {policy, critic, batches, runs} comes in.

A run is options of verl's configuration by their names; each of its `batches` is learned from in a step. verl's own
loop (`fit`) runs, and its workers, with FSDP2 over gloo; generation is what `batches` say. Run as a file with PyPI's
verl in front. Prints a list of runs, each a list of the steps' metrics.
"""

import contextlib
import json
import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from transformers import AutoModelForTokenClassification
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import set_platform

import verl
from verl.protocol import DataProto
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

DEFAULTS = Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"


class Device(ModuleType):
    """`torch.cpu`, with what verl asks of an accelerator's module."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name == "get_device_name":
            return lambda *_: "CPU"
        if name.startswith(("memory_", "max_memory_", "reset_")):
            return lambda *_, **__: 0
        if name == "mem_get_info":
            return lambda *_: (0, 1)
        if name == "get_device_properties":
            return lambda *_: SimpleNamespace(total_memory=1 << 30)
        if name in ("empty_cache", "ipc_collect"):
            return lambda: None
        raise AttributeError(name)


class CPU(PlatformBase):
    """A platform of verl's plug-in interface."""

    device_name, vendor_name, device_module = "cpu", "cpu", Device("torch.cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing is under way."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        """There are none."""

    def empty_cache(self) -> None:
        """There is none."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "NONE"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield

    def profiler_start(self) -> None:
        """Nothing is profiled."""

    profiler_stop = profiler_start

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


class Group:
    """A worker in the place of a group of one."""

    world_size = 1

    def __init__(self, worker: Any) -> None:
        self._worker, self._dispatch_info = worker, {}

    def _query_dispatch_info(self, *_: Any) -> list[int]:
        return [0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)


class Later(Group):
    """What it computes is there when it is asked for."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            result = getattr(self._worker, name)(*args)
            return SimpleNamespace(get=lambda: result)

        return call


class Nothing:
    """Does whatever it is asked to: nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Rollouts:
    def __init__(self, batches: list[dict[str, Any]]) -> None:
        self._left = [{name: torch.tensor(rows) for name, rows in batch.items()} for batch in batches]

    def generate_sequences(self, _: DataProto) -> DataProto:
        tensors = self._left.pop(0)
        rows = len(tensors["responses"])
        columns = {
            "multi_modal_inputs": np.array([{} for _ in range(rows)], dtype=object),
            "__num_turns__": np.array([2] * rows, dtype=np.int32),
        }
        return DataProto.from_dict(tensors, columns, {"timing": {}, "reward_extra_keys": []})


def configured(given: dict[str, Any], options: dict[str, Any]) -> Any:
    config = OmegaConf.load(DEFAULTS)
    policy, critic = given["policy"], given["critic"]
    model = {"use_remove_padding": False, "enable_gradient_checkpointing": False}
    eager = {"attn_implementation": "eager"}
    of_shards = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    exact = {"dtype": "float32", "mixed_precision": of_shards}  # shards are bfloat16, whatever `dtype` says
    micro = {"log_prob_micro_batch_size_per_gpu": 2}
    every = {
        "actor_rollout_ref.model": {"path": policy, "override_config": eager, **model},
        "actor_rollout_ref.actor": {"strategy": "fsdp2", "ppo_micro_batch_size_per_gpu": 2, "use_torch_compile": False},
        "actor_rollout_ref.actor.fsdp_config": exact,
        "actor_rollout_ref.ref": {"strategy": "fsdp2", "fsdp_config": exact, **micro},
        "actor_rollout_ref.rollout": {"calculate_log_probs": True, **micro},
        "critic": {"strategy": "fsdp2", "ppo_micro_batch_size_per_gpu": 2, "fsdp": exact},
        "critic.model": {"path": critic, "override_config": eager, **model},
        "trainer": {"logger": ["file"], "total_epochs": 1, "val_before_train": False, "test_freq": -1, "save_freq": -1},
        "trainer.n_gpus_per_node": 1,
    }
    for key, value in (every | options).items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def actor_worker(config: Any, role: str) -> Group:
    from verl.workers.engine_workers import ActorRolloutRefWorker

    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role=role)
    worker.init_model()
    return Group(worker)


def critic_worker(config: Any) -> Group:
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import value_loss

    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig, TrainingWorkerConfig

    critic = omega_conf_to_dataclass(config.critic)
    model = {key: config.critic.model[key] for key in ("path", "use_remove_padding", "enable_gradient_checkpointing")}
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model",
            model_config=HFModelConfig(**model, load_tokenizer=False, model_type="value_model"),
            engine_config=replace(critic.fsdp, max_token_len_per_gpu=64, infer_max_token_len_per_gpu=64),
            optimizer_config=critic.optim,
            checkpoint_config=critic.checkpoint,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(value_loss, config=critic))
    return Later(worker)


def steps(given: dict[str, Any], options: dict[str, Any], log: Path) -> list[dict[str, float]]:
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    class Trainer(RayPPOTrainer):
        """Its loop; what it starts, and what is asked for that is not here, are left out."""

        def __init__(self, **parts: Any) -> None:
            vars(self).update(parts)

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    config = configured(given, options)
    prompts = config.data.train_batch_size
    row = {
        "raw_prompt": np.array([[{"role": "user"}] for _ in range(prompts)] + [None], dtype=object)[:prompts],
        "data_source": np.array(["s"] * prompts, dtype=object),
        "dummy_tensor": torch.zeros(prompts, 1),
    }
    left_out = ("load_checkpoint", "save_checkpoint", "start_profiling", "stop_profiling", "validate")
    has_critic = config.algorithm.adv_estimator == "gae"
    Trainer(
        **{f"_{name}": lambda *_, **__: None for name in (*left_out, "init_dump_executor", "shutdown_dump_executor")},
        config=config,
        actor_rollout_wg=actor_worker(config, "actor"),
        ref_policy_wg=actor_worker(config, "ref"),
        critic_wg=critic_worker(config) if has_critic else None,
        ref_in_actor=False,
        use_reference_policy=True,
        use_rm=False,
        use_critic=has_critic,
        async_rollout_manager=Rollouts(given["batches"]),
        checkpoint_manager=Nothing(),
        llm_server_manager=Nothing(),
        resource_pool_manager=SimpleNamespace(get_n_gpus=lambda: 1),
        total_training_steps=len(given["batches"]),
        train_dataloader=[row] * len(given["batches"]),
        train_dataset=object(),
        kl_ctrl_in_reward=core_algos.get_kl_controller(config.algorithm.kl_ctrl),
        _dump_executor=SimpleNamespace(_shutdown=False),
    ).fit()
    return [json.loads(line)["data"] for line in log.read_text().splitlines()]


def main() -> list[Any]:
    given = json.load(sys.stdin)
    set_platform(CPU())
    for backends in EngineRegistry._engines.values():
        backends["fsdp2"]["cpu"] = backends["fsdp2"]["cuda"]
    offload = transformer_impl.CPUOffloadPolicy
    transformer_impl.CPUOffloadPolicy = lambda **_: offload(pin_memory=False)
    load = AutoModelForTokenClassification.from_pretrained  # which is asked for flash attention
    AutoModelForTokenClassification.from_pretrained = lambda *args, **options: load(
        *args, **{**options, "attn_implementation": "eager"}
    )
    torch.autocast = lambda *_, **__: contextlib.nullcontext()  # to bfloat16 as well
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"RAY_LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    found = []
    for number, options in enumerate(given["runs"]):
        log = Path(tempfile.mkdtemp()) / f"{number}.jsonl"
        os.environ["VERL_FILE_LOGGER_PATH"] = str(log)
        found.append(steps({**given, "batches": given["batches"][number]}, options, log))
    return found


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main()))
