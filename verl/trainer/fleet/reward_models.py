"""The engines of a run's reward model: their placement, start, sleep and end."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.protocol import DataProto
from verl.trainer.fleet.counts import num_reward_engines
from verl.utils.config import ConfigError
from verl.utils.model import load_hf_config, resolve_model_path
from verl.utils.model_files import require_whole_files
from verl.utils.reward_score import RewardFunction, load_reward_function
from verl.utils.reward_score.served import ADDRESS, TOKENIZER, AskedFunction, ScoredByModel
from verl.workers.config import HFModelConfig, PPOConfig
from verl.workers.reward_manager import GivenUp, RewardManager, RewardOutput
from verl.workers.reward_model import RewardModelServer, ServerSpec
from verl.workers.reward_model.engines import ENGINES
from verl.workers.rollout.base import RAY_RESOURCE, VISIBLE_DEVICES
from verl.workers.rollout.registry import RolloutReplicaRegistry

KEY = "reward_model"
START_S = 600.0
logger = logging.getLogger(__name__)
_HEADS = ("ForSequenceClassification", "RewardModel", "ForTokenClassification")


def reward_function(config: PPOConfig) -> RewardFunction:
    """The function that scores responses: the user's, the reward model's, or the built-in rules'.

    Raises ConfigError, also for a reward model that no function would use.
    """
    settings = config.reward_model
    if not settings.enable:
        return load_reward_function(config.custom_reward_function)
    path = model_path(config)
    require_engine(config, path)
    if config.custom_reward_function.path is not None:
        function = load_reward_function(config.custom_reward_function, also=(ADDRESS, TOKENIZER))
        return AskedFunction(function, addresses_file(config), str(path))
    if not has_head(config, path):
        raise ConfigError(
            f"{KEY}.model.path={settings.model.path}: the model has no score head; set custom_reward_function.path to "
            "the function that calls it"
        )
    return ScoredByModel(addresses_file(config), settings.timeout_s)


def model_path(config: PPOConfig) -> Path:
    settings = config.reward_model
    if settings.model.path is None:
        raise ConfigError(f"{KEY}.enable=true needs {KEY}.model.path")
    path = resolve_model_path(settings.model.path, key=f"{KEY}.model.path")
    require_whole_files(path, f"{KEY}.model.path")
    return path


def has_head(config: PPOConfig, path: Path) -> bool:
    """Whether the model has a head for scores, by the class name in its config."""
    model = HFModelConfig(path=str(path), trust_remote_code=config.reward_model.model.trust_remote_code)
    classes = getattr(load_hf_config(model), "architectures", None) or []
    return any(name.endswith(_HEADS) for name in classes)


def require_engine(config: PPOConfig, path: Path) -> None:
    """Raises ConfigError for a model that the engine does not serve, BackendUnavailable without its package."""
    name = config.reward_model.rollout.name
    if name == "sglang" and has_head(config, path):
        raise ConfigError(
            f"{KEY}.rollout.name=sglang: {config.reward_model.model.path} has a score head, and SGLang adds to "
            "some heads (Qwen2's, Qwen3's) a bias that no checkpoint has: set it to vllm, which serves all of them"
        )
    RolloutReplicaRegistry.get(name)


def addresses_file(config: PPOConfig) -> Path:
    return Path(config.trainer.output_dir).absolute() / "reward_model.json"


class RewardModels:
    """The engines, started by `start` and ended by `close`. Lives on the driver."""

    def __init__(self, config: PPOConfig, device: str) -> None:
        """Raises ConfigError for a missing model."""
        self._config, self._device = config, device
        self._path = model_path(config)
        self._scores = has_head(config, self._path)
        require_engine(config, self._path)
        self._own = config.reward_model.enable_resource_pool
        self._engines: list[Any] = []

    def start(self, trainer_nodes: Sequence[str]) -> None:
        """Start all engines and write their addresses to a file; `trainer_nodes` are the Ray nodes of trainer ranks.

        Engines on the trainer's devices sleep afterwards. Raises RolloutError.
        """
        count = num_reward_engines(self._config, self._device)
        self._require_devices(count)
        logger.info("starting %d engine%s of the reward model (takes about 30 s)", count, "s" * (count > 1))
        remote: Any = ray.remote(RewardModelServer)
        self._engines = [
            remote.options(**self._options(index, trainer_nodes)).remote(self._spec(index)) for index in range(count)
        ]
        addresses = ray.get([engine.start.remote(START_S) for engine in self._engines], timeout=START_S + 60)
        addresses_file(self._config).write_text(json.dumps(addresses), encoding="utf-8")
        self._all("sleep")

    def wake_up(self) -> None:
        self._all("wake_up")

    def sleep(self) -> None:
        self._all("sleep")

    def close(self) -> None:
        """End the engines by ending their actors. Idempotent."""
        for engine in self._engines:
            ray.kill(engine)
        self._engines = []
        addresses_file(self._config).unlink(missing_ok=True)

    def _require_devices(self, count: int) -> None:
        """Raises ConfigError where Ray would wait for ever."""
        kind = RAY_RESOURCE.get(self._device) if self._own else None
        if kind is None:
            return
        needed = count * self._config.reward_model.rollout.tensor_model_parallel_size
        cluster: Any = ray
        free = cluster.available_resources().get(kind, 0)
        if free < needed:
            raise ConfigError(
                f"{KEY}.enable_resource_pool=true needs {needed} more devices ({kind}); {free:g} are free"
            )

    def _all(self, method: str) -> None:
        ray.get([getattr(engine, method).remote() for engine in self._engines], timeout=START_S)

    def _spec(self, index: int) -> ServerSpec:
        settings = self._config.reward_model
        sleeps = not self._own and self._device != "cpu" and settings.rollout.free_cache_engine
        environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1" if sleeps else "0"}
        if self._device == "cpu":
            environment |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
            environment |= ENGINES[settings.rollout.name].environment_on_cpu
        return ServerSpec(
            name=f"reward_model_{index}",
            model=str(self._path),
            names=tuple(dict.fromkeys([str(settings.model.path), str(self._path)])),
            scores=self._scores,
            trust_remote_code=settings.model.trust_remote_code,
            config=settings.rollout,
            device=self._device,
            can_sleep=sleeps,
            log=Path(self._config.trainer.output_dir).absolute() / f"reward_model_{index}.log",
            environment=environment,
        )

    def _options(self, index: int, trainer_nodes: Sequence[str]) -> dict[str, Any]:
        """Devices of its own, or those of the trainer ranks beside which it runs."""
        ranks = self._config.reward_model.rollout.tensor_model_parallel_size
        if self._own:
            kind = RAY_RESOURCE.get(self._device)
            devices = {} if kind is None else {"num_gpus": ranks} if kind == "GPU" else {"resources": {kind: ranks}}
            return {"num_cpus": 0, **devices}
        node = index % len(trainer_nodes)
        options: dict[str, Any] = {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(trainer_nodes[node], soft=False),
        }
        if self._device in VISIBLE_DEVICES:
            first = index // len(trainer_nodes) * ranks
            name = VISIBLE_DEVICES[self._device]
            seen = {name: ",".join(str(rank) for rank in range(first, first + ranks))}
            options["runtime_env"] = {"env_vars": seen | {f"RAY_EXPERIMENTAL_NOSET_{name}": "1"}}
        return options


class AwakeForScoring:
    """A reward manager that wakes the reward model's engines only while it scores."""

    def __init__(self, manager: RewardManager, models: RewardModels) -> None:
        self._manager, self._models = manager, models

    def __call__(self, data: DataProto, given_up: GivenUp | None = None) -> RewardOutput:
        self._models.wake_up()
        try:
            return self._manager(data, given_up)
        finally:
            self._models.sleep()

    def __enter__(self) -> Self:
        self._manager.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._manager.__exit__(*error)
