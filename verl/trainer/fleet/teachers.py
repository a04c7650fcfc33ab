"""The teachers of a run: their engines' placement, and the routing of samples to them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from verl.protocol import DataProto, tensors_of
from verl.trainer.fleet.counts import num_teacher_engines
from verl.utils.config import ConfigError
from verl.utils.model import load_hf_config, resolve_model_path
from verl.utils.model_files import require_whole_files
from verl.workers.config import HFModelConfig, PPOConfig, RolloutConfig
from verl.workers.config.distillation import TeacherConfig
from verl.workers.rollout.base import RAY_RESOURCE
from verl.workers.rollout.engine import EngineSpec
from verl.workers.rollout.errors import ReplicaDied, ReplicaTimeout, RolloutError
from verl.workers.rollout.vllm.replica import VLLMReplica
from verl.workers.teacher.scores import Scores
from verl.workers.teacher.server import TeacherServer

KEY = "distillation.teacher_models"
START_S = 600.0
ANSWER_S = 600.0
"""The longest time without any answer while a batch is scored."""
STOP_S = 10.0
MAX_CONCURRENCY = 100_000
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """One teacher, with the settings of its engines."""

    name: str
    config: TeacherConfig
    path: Path
    count: int
    """The number of its engines."""
    replica: VLLMReplica
    """Used only for its settings of how to start vLLM."""


def teachers_of(config: PPOConfig, device: str) -> list[Teacher]:
    """Raises ConfigError for a teacher with missing files, or with settings unknown to vLLM."""
    return [_teacher(config, name, teacher, device) for name, teacher in sorted(config.distillation.teachers.items())]


def longest(config: PPOConfig) -> int:
    """The length of the longest scored sequence in tokens, plus the one that vLLM adds."""
    return config.data.max_prompt_length + config.data.max_response_length + 1


def _teacher(config: PPOConfig, name: str, teacher: TeacherConfig, device: str) -> Teacher:
    key = f"{KEY}.{name}"
    if teacher.model_path is None:
        raise ConfigError(f"{key} needs {key}.model_path")
    path = resolve_model_path(teacher.model_path, key=f"{key}.model_path")
    require_whole_files(path, f"{key}.model_path")
    model = HFModelConfig(path=str(path), trust_remote_code=teacher.trust_remote_code)
    _require_positions(config, key, teacher, model)
    try:
        replica = VLLMReplica(replica_rank=0, config=_engine_config(config, teacher), model=model, device=device)
    except ConfigError as exc:
        raise ConfigError(str(exc).replace("rollout.engine_kwargs", f"{key}.inference.engine_kwargs")) from exc
    return Teacher(
        name=name, config=teacher, path=path, count=num_teacher_engines(config, teacher, device), replica=replica
    )


def _require_positions(config: PPOConfig, key: str, teacher: TeacherConfig, model: HFModelConfig) -> None:
    text = load_hf_config(model).get_text_config()
    limit, needed = getattr(text, "max_position_embeddings", None), teacher.inference.max_model_len or longest(config)
    stretched = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
    if limit is not None and needed > limit and not stretched:
        raise ConfigError(
            f"{key}.model_path={teacher.model_path} has max_position_embeddings={limit}, and data.max_prompt_length + "
            f"data.max_response_length + 1 = {needed} tokens are scored"
        )


def _engine_config(config: PPOConfig, teacher: TeacherConfig) -> RolloutConfig:
    """In the words of a rollout engine, which it is but for its weights."""
    inference = teacher.inference
    own = dict(inference.engine_kwargs.get("vllm") or {})
    if inference.expert_parallel_size > 1:
        own["enable_expert_parallel"] = True
    if inference.cudagraph_capture_sizes is not None:
        own["cudagraph_capture_sizes"] = inference.cudagraph_capture_sizes
    return RolloutConfig(
        name="vllm",
        dtype=inference.dtype or config.actor_rollout_ref.rollout.dtype,
        tensor_model_parallel_size=inference.tensor_model_parallel_size,
        gpu_memory_utilization=inference.gpu_memory_utilization,
        cpu_kvcache_gib=inference.cpu_kvcache_gib,
        enforce_eager=inference.enforce_eager,
        max_model_len=inference.max_model_len or longest(config),
        max_num_seqs=inference.max_num_seqs,
        max_num_batched_tokens=inference.max_num_batched_tokens,
        enable_chunked_prefill=inference.enable_chunked_prefill,
        enable_prefix_caching=inference.enable_prefix_caching,
        load_format=inference.load_format,
        engine_kwargs=inference.engine_kwargs | {"vllm": own},
    )


class Asked:
    """A batch that teachers are scoring."""

    def __init__(self) -> None:
        self._waiting: dict[Any, tuple[int, str]] = {}
        """By Ray's reference to the answer: the row of the batch, and the engine."""

    def add(self, answer: Any, row: int, engine: str) -> None:
        self._waiting[answer] = row, engine

    def wait(self) -> dict[int, Scores]:
        """Wait for all scores; returns them by row. Raises RolloutError that names the engine."""
        waiting, found = dict(self._waiting), dict[int, Scores]()
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=ANSWER_S)
            if not ready:
                names = ", ".join(sorted({name for _, name in waiting.values()}))
                raise ReplicaTimeout(f"{names} scored nothing for {ANSWER_S:g} s; {len(waiting)} responses are missing")
            row, name = waiting.pop(ready[0])
            found[row] = _answer(name, ready[0], ANSWER_S)
        return found


class Teachers:
    """The teachers' engines, started by `begin_start` and ended by `close`. Lives on the driver."""

    def __init__(self, config: PPOConfig, device: str) -> None:
        """Raises ConfigError for a missing teacher."""
        self._config, self._device = config, device
        self._teachers = teachers_of(config, device)
        self._engines: dict[str, list[tuple[str, Any]]] = {}
        """By the teacher's name: (the engine's name, the actor)."""
        self._starting: list[Any] = []

    def begin_start(self) -> None:
        """Start the engines. Raises ConfigError if Ray could never place them."""
        self._require_devices()
        remote: Any = ray.remote(TeacherServer)
        for teacher in self._teachers:
            engines = self._engines.setdefault(teacher.name, [])
            for index in range(teacher.count):
                spec = self._spec(teacher, index)
                loss = self._config.distillation.distillation_loss
                engines.append((spec.name, remote.options(**self._options(teacher)).remote(spec, loss.num_candidates)))
        count = sum(map(len, self._engines.values()))
        logger.info("starting %d engine%s of teachers (takes about 30 s)", count, "s" * (count > 1))
        self._starting = [actor.start.remote() for _, actor in self._everyone()]

    def await_started(self) -> None:
        """Wait until all engines run. Raises ConfigError or RolloutError that names the engine."""
        for (name, _), started in zip(self._everyone(), self._starting, strict=True):
            _answer(name, started, START_S)

    def ask(self, batch: DataProto) -> Asked:
        """Start scoring every response of `batch` by its teacher, in the background.

        Raises ConfigError for a sample that has none.
        """
        tensors = tensors_of(batch)
        attended, responses = tensors["attention_mask"].bool(), tensors["responses"].shape[1]
        counts = attended[:, -responses:].sum(-1).tolist()
        has_loss = tensors["response_mask"].any(-1).tolist()
        turns = {name: itertools.cycle(engines) for name, engines in self._engines.items()}
        asked = Asked()
        for row, name in enumerate(self.routes(batch)):
            if not has_loss[row]:
                continue
            engine, actor = next(turns[name])
            token_ids = tensors["input_ids"][row][attended[row]].tolist()
            asked.add(actor.score.remote(token_ids, counts[row]), row, engine)
        return asked

    def routes(self, batch: DataProto) -> list[str]:
        """The teacher of each row. Raises ConfigError for a sample that has none."""
        if len(self._teachers) == 1:
            return [self._teachers[0].name] * len(batch)
        column, by_key = self._config.distillation.teacher_key, {each.config.key: each.name for each in self._teachers}
        if column not in batch.non_tensor_batch:
            raise ConfigError(f"distillation.teacher_key={column}: samples have no such column")
        keys = batch.non_tensor_batch[column].tolist()
        if missing := sorted({str(key) for key in keys if key not in by_key}):
            known = ", ".join(sorted(map(str, by_key)))
            raise ConfigError(f"{KEY}: no teacher has the key {missing[0]}, which is the {column} of samples ({known})")
        return [by_key[key] for key in keys]

    def close(self) -> None:
        """End the engines. Idempotent."""
        engines, self._engines, self._starting = self._everyone(), {}, []
        if engines:
            ending = [actor.shutdown.remote() for _, actor in engines]
            ray.wait(ending, num_returns=len(ending), timeout=STOP_S)
        for _, actor in engines:
            ray.kill(actor)

    def _everyone(self) -> list[tuple[str, Any]]:
        return [engine for engines in self._engines.values() for engine in engines]

    def _require_devices(self) -> None:
        kind = RAY_RESOURCE.get(self._device)
        if kind is None:
            return
        needed = sum(each.count * each.config.inference.tensor_model_parallel_size for each in self._teachers)
        cluster: Any = ray
        free = cluster.available_resources().get(kind, 0)
        if free < needed:
            raise ConfigError(f"distillation.enabled=true needs {needed} more devices ({kind}); {free:g} are free")

    def _spec(self, teacher: Teacher, index: int) -> EngineSpec:
        replica = teacher.replica
        return EngineSpec(
            name=f"teacher {teacher.name}-{index}",
            engine="",
            config=replica.config,
            model=replica.model,
            device=self._device,
            max_model_len=replica.config.max_model_len or longest(self._config),
            seed=0,
        )

    def _options(self, teacher: Teacher) -> dict[str, Any]:
        ranks, kind = teacher.config.inference.tensor_model_parallel_size, RAY_RESOURCE.get(self._device)
        devices = {} if kind is None else {"num_gpus": ranks} if kind == "GPU" else {"resources": {kind: ranks}}
        return {
            "num_cpus": 0,
            "max_concurrency": MAX_CONCURRENCY,
            "runtime_env": {"env_vars": teacher.replica.env_vars()},
            **devices,
        }


def _answer(name: str, reference: Any, timeout_s: float) -> Any:
    """Errors of ours arrive as themselves; a dead engine is ReplicaDied."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError as exc:
        raise ReplicaTimeout(f"{name} did not answer within {timeout_s:g} s") from exc
    except RayActorError as exc:
        raise ReplicaDied(f"{name} died: {str(exc).strip().splitlines()[0]}") from exc
    except RayTaskError as exc:
        if isinstance(exc.cause, (RolloutError, ConfigError)):
            raise exc.cause from exc
        raise RolloutError(f"{name}: {type(exc.cause).__name__}: {exc.cause}") from exc


def padded_scores(scores: dict[int, Scores], shape: Sequence[int], vocabulary: int) -> tuple[np.ndarray, ...]:
    """(log-probs [B, R], candidates [B, R, K], their log-probs [B, R, K]); 0 where nothing was scored.

    Candidates outside the student's vocabulary become token 0 with log-prob -inf: models of one family pad it
    differently.
    """
    width = max((each.candidates.shape[1] for each in scores.values()), default=0)
    log_probs = np.zeros(shape, dtype=np.float32)
    candidates = np.zeros((*shape, width), dtype=np.int32)
    candidate_log_probs = np.zeros((*shape, width), dtype=np.float32)
    for row, each in scores.items():
        count = len(each.log_probs)
        log_probs[row, :count] = each.log_probs
        is_known = each.candidates < vocabulary
        candidates[row, :count] = np.where(is_known, each.candidates, 0)
        candidate_log_probs[row, :count] = np.where(is_known, each.candidate_log_probs, -np.inf)
    return log_probs, candidates, candidate_log_probs
