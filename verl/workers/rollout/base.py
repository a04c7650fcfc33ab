"""`RolloutReplica`: the driver's handle of one inference engine, which may span several tensor-parallel ranks."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from verl.checkpoint_engine.errors import CheckpointEngineError
from verl.checkpoint_engine.plan.types import EngineCheckResult
from verl.checkpoint_engine.support.memory import MemoryUse
from verl.utils.config import ConfigError
from verl.utils.timing import Span
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.engine import EngineSpec
from verl.workers.rollout.errors import NoWeights, ReplicaDied, ReplicaTimeout, RolloutError
from verl.workers.rollout.records import (
    NO_VERSION,
    RolloutMode,
    SamplingOptions,
    StopReason,
    TokenOutput,
    WeightVersionSpan,
)
from verl.workers.rollout.server import CONCURRENCY, RolloutServer

__all__ = [
    "NO_VERSION",
    "NoWeights",
    "Placement",
    "ReplicaDied",
    "ReplicaTimeout",
    "RolloutError",
    "RolloutMode",
    "RolloutReplica",
    "SamplingOptions",
    "StopReason",
    "TokenOutput",
    "WeightVersionSpan",
]

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 10.0
SPANS_TIMEOUT_S = 2.0
"""The timeout of a request for past spans."""
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
RAY_RESOURCE = {"cuda": "GPU", "npu": "NPU"}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The placement of a server. The default lets Ray choose, and fits one replica on one machine."""

    node_index: int = 0
    """Rollout node whose arena the replica reads."""
    local_index: int = 0
    """Index among the `local_count` replicas of the same machine; they divide its CPU cores."""
    local_count: int = 1
    node_id: str | None = None
    """The Ray node on which the server must run."""
    placement_group: PlacementGroup | None = None
    """Placement group, and its bundle, that the server must run in; takes precedence over `node_id`."""
    bundle_index: int = -1
    device_ids: tuple[str, ...] = ()
    """Accelerators shared with others, one per rank of the replica. Modes HYBRID and COLOCATED need them."""


class RolloutReplica(ABC):
    """Starts one server actor and forwards calls to it, each with a deadline and an error that names the replica.

    Implements `verl.checkpoint_engine.ports.Replica`. Lives on the driver; not thread-safe. One of `init_hybrid`,
    `init_colocated`, `init_standalone` starts it; use `launch_all` to start several at once.
    """

    engine: ClassVar[str]
    """"module:Class" of the `Engine` that the server runs."""
    can_sleep_on: ClassVar[tuple[str, ...]] = ()
    """Devices on which the engine can free its memory."""
    loads_adapters: ClassVar[bool] = False
    """The engine reads the model's weights from its directory, and a version may be adapters for them alone."""
    deals_experts: ClassVar[bool] = False
    """Whether the engine divides experts among its ranks, data-parallel ones included."""
    tells_experts_on: ClassVar[tuple[str, ...]] = ()
    """Devices on which the engine reports the experts of every token."""
    quantizes_on: ClassVar[tuple[str, ...]] = ()
    """Devices on which the engine can quantize weights as it loads them."""
    startup_hints: ClassVar[Mapping[str, str]] = {}
    """By device: a hint for users while the engine starts."""

    def __init__(self, *, replica_rank: int, config: RolloutConfig, model: HFModelConfig, device: str = "cpu") -> None:
        """`model.path` is a local directory; `config.prompt_length` and `response_length` are set.

        Raises ConfigError for anything in `config` that the engine cannot do.
        """
        self.replica_rank = replica_rank
        self.config = config
        self.model = model
        self.device = device
        self.mode: RolloutMode | None = None
        self.placement = Placement()
        self.kept_wide: tuple[str, ...] = ()
        """Tensors that the engine keeps in float32 at any `rollout.dtype`. Known once it has started."""
        self._handle: ActorHandle[RolloutServer] | None = None
        self._max_model_len = _max_model_len(config)
        if model.sends_adapters and not self.loads_adapters:
            raise ConfigError(
                f"actor_rollout_ref.model.lora.merge=false needs an engine that loads adapters, which "
                f"actor_rollout_ref.rollout.name={config.name} does not: set lora.merge=true, or rollout.name=vllm"
            )
        if problem := config.why_not_dealt():
            raise ConfigError(problem)
        if config.expert_parallel_size > 1 and not self.deals_experts:
            raise ConfigError(
                f"actor_rollout_ref.rollout.expert_parallel_size={config.expert_parallel_size}: the engine of "
                f"actor_rollout_ref.rollout.name={config.name} does not deal experts out; set it to 1, or "
                "rollout.name=vllm"
            )
        if config.enable_rollout_routing_replay and device not in self.tells_experts_on:
            where = " or ".join(self.tells_experts_on) or "no device"
            raise ConfigError(
                f"actor_rollout_ref.rollout.enable_rollout_routing_replay=true: on {device} the engine of "
                f"actor_rollout_ref.rollout.name={config.name} does not report which experts it chose (on {where}); "
                "actor_rollout_ref.actor.megatron.router_replay.mode=R2 needs no engine that does"
            )
        if config.quantization is not None:
            self._check_quantization()
        self.check_config()

    def _check_quantization(self) -> None:
        """Weights that are rounded once more arrive right if the engine compares them with a load from disk."""
        config = self.config
        key = f"actor_rollout_ref.rollout.quantization={config.quantization}"
        if self.device not in self.quantizes_on:
            where = " or ".join(self.quantizes_on) or "no device"
            raise ConfigError(
                f"{key}: on {self.device} the engine of actor_rollout_ref.rollout.name={config.name} does not quantize "
                f"weights that it is sent (on {where})"
            )
        if config.dtype != "bfloat16":
            raise ConfigError(f"{key} needs actor_rollout_ref.rollout.dtype=bfloat16, not {config.dtype}")
        if self.model.sends_adapters:
            raise ConfigError(f"{key} needs actor_rollout_ref.model.lora.merge=true: adapters are not quantized")
        if config.checkpoint_engine.get("check_engine") == "off":
            raise ConfigError(f"{key} needs checkpoint_engine.check_engine=first or always, not off")

    @abstractmethod
    def check_config(self) -> None:
        """Raises ConfigError, on the driver, for options that this engine does not support."""

    @abstractmethod
    def env_vars(self) -> dict[str, str]:
        """Environment of the server process."""

    @property
    def name(self) -> str:
        return f"replica-{self.replica_rank}"

    @property
    def node_index(self) -> int:
        return self.placement.node_index

    @property
    def server_handle(self) -> ActorHandle[RolloutServer]:
        """`await handle.generate.remote(prompt_ids, sampling, request_id) -> TokenOutput`."""
        if self._handle is None:
            raise RolloutError(f"{self.name} has not been started")
        return self._handle

    # -- start and end ----------------------------------------------------------------------------------------------

    async def init_hybrid(self, placement: Placement) -> None:
        """Start on the trainer's accelerators; `sleep` and `wake_up` make room for each other."""
        await self._init(RolloutMode.HYBRID, placement)

    async def init_colocated(self, placement: Placement) -> None:
        """Start on accelerators that others use at the same time; `sleep` and `wake_up` do nothing."""
        await self._init(RolloutMode.COLOCATED, placement)

    async def init_standalone(self, placement: Placement | None = None) -> None:
        """Start on accelerators of its own, which Ray assigns; `sleep` and `wake_up` do nothing."""
        await self._init(RolloutMode.STANDALONE, placement or Placement())

    async def _init(self, mode: RolloutMode, placement: Placement) -> None:
        if self._handle is None or (self.mode, self.placement) != (mode, placement):
            self.begin_server(mode, placement)
        await self._start_engine()

    def begin_server(self, mode: RolloutMode, placement: Placement) -> None:
        """Start the server's process, which imports the engine's package and takes no device; `init_*` with the same
        placement starts the engine in it. Does not wait."""
        ranks = self.config.replica_ranks
        shares = mode is not RolloutMode.STANDALONE and self.device != "cpu"
        if shares and len(placement.device_ids) != ranks:
            raise ConfigError(
                f"{self.name}: {mode.value} with {ranks} ranks needs {ranks} device ids, not {placement.device_ids}"
            )
        self.mode, self.placement = mode, placement
        self.kill()
        self._handle = self._new_server()

    async def launch_servers(self) -> None:
        """Start the server actor and its engine again, after the server or its engine died."""
        if self.mode is None:
            raise RolloutError(f"{self.name} has no mode yet; call init_hybrid, init_colocated or init_standalone")
        if self._handle is not None:
            await self.shutdown()
        self._handle = self._new_server()
        await self._start_engine()

    async def _start_engine(self) -> None:
        try:
            self.kept_wide = await self._call("start", deadline="startup_timeout_s")
        except BaseException:
            self.kill()
            raise

    def _new_server(self) -> ActorHandle[RolloutServer]:
        spec = EngineSpec(
            name=self.name,
            engine=self.engine,
            config=self.config,
            model=self.model,
            device=self.device,
            max_model_len=self._max_model_len,
            seed=self.config.seed + self.replica_rank,
            local_index=self.placement.local_index,
            local_count=self.placement.local_count,
            can_sleep=self.can_sleep,
        )
        actor: Any = ray.remote(**CONCURRENCY)(RolloutServer)
        handle: ActorHandle[RolloutServer] = actor.options(**self._actor_options()).remote(spec)
        return handle

    @property
    def can_sleep(self) -> bool:
        """Whether `sleep` frees memory: it is configured, the replica shares its device, and the engine supports it."""
        wanted = self.mode is RolloutMode.HYBRID and self.config.free_cache_engine
        return wanted and self.device in self.can_sleep_on

    def _actor_options(self) -> dict[str, Any]:
        env = self.env_vars()
        options: dict[str, Any] = {"num_cpus": self.config.num_cpus, "max_restarts": 0}
        if self.device in RAY_RESOURCE:
            if self.mode is RolloutMode.STANDALONE:
                ranks = self.config.replica_ranks
                options |= {"num_gpus": ranks} if self.device == "cuda" else {"resources": {"NPU": ranks}}
            else:  # their owner holds them in Ray's books; we only look at them
                env |= {VISIBLE_DEVICES[self.device]: ",".join(self.placement.device_ids)}
                env |= {f"RAY_EXPERIMENTAL_NOSET_{VISIBLE_DEVICES[self.device]}": "1"}
        if self.placement.placement_group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self.placement.placement_group, placement_group_bundle_index=self.placement.bundle_index
            )
        elif self.placement.node_id is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self.placement.node_id, soft=False)
        return options | {"runtime_env": {"env_vars": env}}

    async def shutdown(self) -> None:
        """End the engine and the server. Does not raise if the server is already dead."""
        if self._handle is None:
            return
        try:
            await self._call("shutdown", timeout_s=HEALTH_TIMEOUT_S)
        except (RolloutError, RayTaskError) as exc:
            logger.warning("%s did not shut down in order and is killed: %s", self.name, exc)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the server process now; the engine's processes end with it. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            ray.kill(handle, no_restart=True)

    # -- verl.checkpoint_engine.ports.Replica -----------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """See the port. `wait` may take as long as the longest response: `rollout.generate_timeout_s`."""
        await self._call("pause", mode, deadline="generate_timeout_s" if mode == "wait" else "control_timeout_s")

    async def activate(self, arena_path: str, version: int) -> EngineCheckResult | None:
        checked: EngineCheckResult | None = await self._call("activate", arena_path, version)
        return checked

    async def resume(self) -> None:
        await self._call("resume")

    async def health(self) -> None:
        """Raises ReplicaDied when the server or its engine is gone, ReplicaTimeout when it does not answer."""
        await self._call("health", timeout_s=HEALTH_TIMEOUT_S)

    async def take_spans(self) -> list[Span]:
        """The spans in which the engine generated, paused or loaded since the last call. Raises as `health`."""
        spans: list[Span] = await self._call("take_spans", timeout_s=SPANS_TIMEOUT_S)
        return spans

    async def memory(self) -> MemoryUse:
        """The memory of the server and its engine on their host. Raises as `health`."""
        use: MemoryUse = await self._call("memory", timeout_s=SPANS_TIMEOUT_S)
        return use

    # -- verl's names -----------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Free weights and KV cache until `wake_up`, or `activate` and `resume`. Does nothing if it cannot sleep."""
        await self._call("sleep", True)

    async def wake_up(self) -> None:
        """Undo `sleep`, with the version that was active before, reloaded from its arena."""
        await self._call("wake_up")

    async def abort_all_requests(self) -> None:
        """End every request in flight with its tokens so far, and stay paused until `resume_generation`."""
        await self.pause("abort")

    async def resume_generation(self) -> None:
        await self.resume()

    async def profile(self, prefix: str | None) -> None:
        """Begin a trace with the name `prefix` and the replica's, or end it."""
        await self._call("profile", f"{prefix}_{self.name}" if prefix else None)

    async def clear_kv_cache(self) -> None:
        """Forget cached prefixes."""
        await self._call("clear_cache")

    async def release_kv_cache(self) -> None:
        """Abort requests in flight and free the KV cache, not the weights. Does nothing if it cannot sleep."""
        await self._call("sleep", False)

    async def resume_kv_cache(self) -> None:
        """Allocate the KV cache again. Generation goes on with `resume_generation`."""
        await self._call("wake_cache")

    async def _call(
        self, method: str, *args: object, deadline: str = "control_timeout_s", timeout_s: float | None = None
    ) -> Any:
        """One control call, with the deadline of that key of the rollout section, or with `timeout_s`.

        Errors of ours arrive as themselves; a dead server is ReplicaDied.
        """
        key = "" if timeout_s else f" (actor_rollout_ref.rollout.{deadline})"
        timeout_s = timeout_s or getattr(self.config, deadline)
        try:
            return await asyncio.wait_for(_result(getattr(self.server_handle, method).remote(*args)), timeout_s)
        except TimeoutError as exc:
            raise ReplicaTimeout(f"{self.name} did not answer {method} within {timeout_s:g} s{key}") from exc
        except RayActorError as exc:
            raise ReplicaDied(f"{self.name} died: {_cause_of_death(exc)}") from exc
        except RayTaskError as exc:
            if isinstance(exc.cause, (RolloutError, CheckpointEngineError, ConfigError)):
                raise exc.cause from exc
            raise RolloutError(f"{self.name}: {method} failed: {type(exc.cause).__name__}: {exc.cause}") from exc


def _cause_of_death(exc: RayActorError) -> str:
    """Ray's message in a line. What failed in the server's constructor stands at the end of a traceback."""
    lines = str(exc).strip().splitlines()
    return lines[-1] if "creation task" in lines[0] else lines[0]


async def _result(ref: Awaitable[Any]) -> Any:
    return await ref


async def launch_all(*launches: Awaitable[None]) -> None:
    """Start several replicas at once: `launch_all(*(replica.init_hybrid(p) for replica, p in ...))`.

    An engine takes tens of seconds to start. If one fails, its error is raised after the others have come up or failed;
    `shutdown` those that came up.
    """
    results = await asyncio.gather(*launches, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        raise failures[0]


def _max_model_len(config: RolloutConfig) -> int:
    if config.max_model_len is not None:
        return config.max_model_len
    if config.prompt_length is None or config.response_length is None:
        raise ConfigError(
            "rollout.max_model_len, or both rollout.prompt_length and rollout.response_length, must be set"
        )
    return config.prompt_length + config.response_length
