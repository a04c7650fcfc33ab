"""vLLM behind the `Engine` port. The one file that imports vLLM; runs in the server process only."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from vllm import SamplingParams
from vllm.config import ProfilerConfig, WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import EngineInput, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from verl.checkpoint_engine.engines.leftovers import Leftovers
from verl.checkpoint_engine.engines.vllm.deaths import told_death
from verl.checkpoint_engine.engines.vllm.reports import take_reports, take_workers
from verl.checkpoint_engine.memory.committed import open_to_activate
from verl.checkpoint_engine.parameter_server.endpoints import ENGINE_NAME
from verl.checkpoint_engine.plan.types import EngineCheckResult
from verl.utils.language_model import WITH_VIDEOS_IN_VLLM, is_wrapper
from verl.utils.model import ATTENTION, load_hf_config
from verl.utils.pictures import Medium, PictureError, PictureProcessor, load_processor
from verl.workers.rollout.engine import EngineSpec, eos_token_ids
from verl.workers.rollout.errors import ReplicaDied, RolloutError
from verl.workers.rollout.records import (
    NO_VERSION,
    SamplingOptions,
    StopReason,
    TokenOutput,
    WeightVersionSpan,
)
from verl.workers.rollout.vllm import exact
from verl.workers.rollout.vllm.adapter import ADAPTER_ID, ADAPTER_NAME, adapter_files, engine_rank
from verl.workers.rollout.vllm.control import LIVENESS_S, controlled
from verl.workers.rollout.vllm.cores import assign_cores, bind_single_worker, omp_threads_bind
from verl.workers.rollout.vllm.pictures import prompt_with
from verl.workers.rollout.vllm.refusals import told_in_a_line
from verl.workers.rollout.vllm.salts import Salts, version_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

TOLD_WITHIN_S, LOOK_S = 1.0, 0.02
"""The report of the dead worker comes up to TOLD_WITHIN_S after calls fail, if at all."""
PATCHES_FROM_HERE = {
    "skip_tokenizer_init": False,  # vLLM's own processor, which no prompt passes, wants a tokenizer all the same
    "mm_processor_cache_gb": 0,
    "mm_device_do_normalize": False,  # on by default, and patches are normalized already
}
"""Options for a vision model."""
NO_VIDEOS = {"limit_mm_per_prompt": {"video": 0}}
"""Those of one that gets none."""
QUANTIZATION = {"fp8": {"quantization": "fp8_per_block", "quantization_config": {"ignore": ["*gate", "*router"]}}}
"""vLLM's values for `rollout.quantization`. Routers are excluded: they are small, and errors matter most there."""
EXPERTS_WORKER = "verl.checkpoint_engine.engines.vllm.cpu_experts.ExpertsWorker"
"""vLLM's worker for CPUs cannot compute with a part of the experts."""
STOP_REASONS: dict[str | None, StopReason] = {"stop": "completed", "length": "length", "abort": "aborted"}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that vLLM has."""

    sampling: SamplingOptions
    num_prompt: int
    seen: tuple[str, ...] = ()
    now: str | None = None
    """The salt of conversations that began when it came; None without salts."""
    salt: str | None = None


class VLLMEngine:
    """One `AsyncLLM` whose weights come from a node arena. See `verl.workers.rollout.engine.Engine`."""

    sees: Literal[True] = True
    keeps: Literal[True] = True
    tells: Literal[True] = True

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._eos: tuple[int, ...] = ()
        self._llm: AsyncLLM | None = None
        self._processor: PictureProcessor | None = None
        """Of a model that sees."""
        self._leftovers: Leftovers | None = None
        self._activating = False
        self._paused = False
        """vLLM was told to pause, and not to go on since."""
        self._serves: int | None = None
        """The version that every worker computes with; None where that is not known."""
        self._salts = None if spec.config.kv_across_versions == "clear" else Salts()
        self._reports = Path()
        """Where workers write what they found about a version."""
        self._deaths = Path()
        """Where vLLM tells which of them died."""
        self._died_s: float | None = None
        """When that was first seen."""
        self._pids: Mapping[int, int] = {}
        """Theirs, by rank."""
        self._asked: dict[str, Asked] = {}
        """By id."""
        self._adapter: LoRARequest | None = None
        """What a request says to be computed with the adapters; None until there are some."""
        self._adapter_directory: Path | None = None

    async def start(self) -> tuple[str, ...]:
        """Start vLLM. Blocks the engine loop, which has no other work before."""
        self._eos = eos_token_ids(self._spec.model)
        self._processor = load_processor(self._spec.model.path, load_hf_config(self._spec.model))
        if self._spec.device == "cpu":
            self._bind_threads()
        if self._spec.config.exact:
            exact.register()
        self._leftovers = Leftovers()
        self._reports = self._leftovers.directory / "reports"
        self._reports.mkdir()
        self._deaths = self._leftovers.directory / "deaths"
        os.environ["VERL_ENGINE_DEATHS"] = str(self._deaths)
        os.environ["VLLM_RPC_BASE_PATH"] = str(self._leftovers.directory)
        with (
            told_in_a_line(self._spec.name, self._spec.device),
            self._leftovers.taking_temporary_files(),
            self._leftovers.finding_shared_memory(),
        ):
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments()))
            init_info = {
                "check_engine": self._spec.config.checkpoint_engine.get("check_engine", "first"),
                "report_directory": str(self._reports),
            }
            await self._control(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info)))
        if self._spec.model.sends_adapters:
            self._adapter_directory = self._leftovers.memory_directory()
        workers = take_workers(self._reports)
        self._pids = workers.pids
        return workers.kept_wide

    def _bind_threads(self) -> None:
        """Give each worker its own cores. Left alone, vLLM binds by NUMA node and refuses more workers than nodes."""
        spec = self._spec
        cores = assign_cores(
            sorted(os.sched_getaffinity(0)),
            replicas=spec.local_count,
            ranks=spec.config.replica_ranks,
            replica=spec.local_index,
        )
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = omp_threads_bind(cores)
        if self._arguments().get("distributed_executor_backend") == "uni":
            bind_single_worker(os.environ, cores[0])

    def _arguments(self) -> dict[str, Any]:
        spec, config = self._spec, self._spec.config
        arguments: dict[str, Any] = {
            "model": spec.model.path,
            "skip_tokenizer_init": True,  # prompts and responses are token ids
            "trust_remote_code": spec.model.trust_remote_code,
            "hf_overrides": spec.model.override_config,
            "dtype": config.dtype,
            "load_format": config.load_format,
            "seed": spec.seed,
            "tensor_parallel_size": config.tensor_model_parallel_size,
            "max_model_len": spec.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            # vLLM wants room for one token of each sequence, and without chunks for a whole prompt.
            "max_num_batched_tokens": max(config.max_num_batched_tokens, spec.max_model_len, config.max_num_seqs),
            # vLLM cannot draw again for a request with a seed whose prompt it has cut, on a CPU.
            "enable_chunked_prefill": config.enable_chunked_prefill and not config.full_determinism,
            "enable_prefix_caching": config.enable_prefix_caching,
            "enforce_eager": config.enforce_eager or spec.device == "cpu",
            "enable_sleep_mode": spec.can_sleep,
            "logprobs_mode": "processed_logprobs",  # those of the distribution that was sampled from
            "generation_config": "vllm",  # sampling is what the request says, not what the checkpoint suggests
            "weight_transfer_config": WeightTransferConfig(backend=ENGINE_NAME),
            "disable_log_stats": True,
        }
        if is_wrapper(load_hf_config(spec.model)):
            arguments["language_model_only"] = True  # the trainer has and sends no more
        if self._processor is not None:
            with_videos = self._processor.model_type in WITH_VIDEOS_IN_VLLM
            arguments |= PATCHES_FROM_HERE | ({} if with_videos else NO_VIDEOS)
        if spec.device == "cpu":
            arguments["kv_cache_memory_bytes"] = int(config.cpu_kvcache_gib * 2**30)
            if config.replica_ranks == 1:
                arguments["distributed_executor_backend"] = "uni"
        else:
            arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        if config.profiler.enable:
            arguments["profiler_config"] = ProfilerConfig(
                profiler="torch", torch_profiler_dir=str(config.profiler.save_path)
            )
        if spec.model.sends_adapters:
            rank = engine_rank(spec.model.lora_rank)
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "load_format": "auto"}
        if config.quantization is not None:
            arguments |= QUANTIZATION[config.quantization]
        if config.enable_rollout_routing_replay:
            arguments["enable_return_routed_experts"] = True
        if config.expert_parallel_size > 1:
            arguments |= {"enable_expert_parallel": True, "data_parallel_size": config.data_ranks}
        if config.exact:
            fields = {name: value for name, value in spec.model.override_config.items() if name != ATTENTION}
            arguments["worker_cls"] = f"{exact.__name__}.{exact.ExactWorker.__name__}"
            arguments["hf_overrides"] = fields | {"architectures": [exact.ARCHITECTURE]}
        arguments |= config.engine_kwargs.get("vllm") or {}
        if spec.device == "cpu" and arguments.get("enable_expert_parallel") and config.replica_ranks > 1:
            arguments.setdefault("worker_cls", EXPERTS_WORKER)
        return arguments

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingOptions,
        request_id: str,
        pictures: Sequence[Medium] = (),
        *,
        cache: str | None = None,
    ) -> TokenOutput:
        prompt: TokensPrompt | EngineInput = TokensPrompt(prompt_token_ids=list(prompt_ids))
        asked = Asked(sampling, len(prompt_ids))
        if self._salts is not None:
            now, salt = self._salts.current, self._salts.of(cache)
            asked = replace(asked, now=now, salt=salt)
            prompt = TokensPrompt(prompt_token_ids=list(prompt_ids), cache_salt=salt)
        if pictures:
            prompt = await self._seen(prompt_ids, pictures, request_id)
            if self._processor is not None:
                asked = replace(asked, seen=self._processor.digests(pictures))
        self._asked[request_id] = asked
        try:
            return await self._generate(prompt, request_id, asked)
        finally:
            del self._asked[request_id]

    async def _generate(self, prompt: TokensPrompt | EngineInput, request_id: str, asked: Asked) -> TokenOutput:
        final: RequestOutput | None = None
        try:
            async for output in self._running().generate(
                prompt, self._sampling_params(asked.sampling), request_id, lora_request=self._adapter
            ):
                final = output  # FINAL_ONLY: there is one
        except EngineDeadError as exc:
            if (rest := self.so_far(request_id, 0)) is None:
                raise ReplicaDied(f"{self._spec.name}: {self._died()} during request {request_id}") from exc
            return rest
        except EngineGenerateError as exc:
            await asyncio.sleep(LIVENESS_S)  # of a core that ends, requests may fail before vLLM knows that it has
            if not self._running().errored:
                raise
            raise ReplicaDied(f"{self._spec.name}: {self._died()} during request {request_id}") from exc
        if final is None:
            raise RolloutError(f"{self._spec.name}: request {request_id} ended without an answer from vLLM")
        reason = final.outputs[0].finish_reason
        if reason not in STOP_REASONS:
            raise RolloutError(f"{self._spec.name}: request {request_id} ended with {reason!r}")
        return self._token_output(final, asked, STOP_REASONS[reason])

    def so_far(self, request_id: str, known: int) -> TokenOutput | None:
        """See `TellingEngine`. None with a seed, which draws the whole response again elsewhere; where experts are
        recorded, which vLLM tells at the end; and where the user's logits processors may look at tokens of a response,
        which are tokens of the prompt elsewhere."""
        asked, config = self._asked.get(request_id), self._spec.config
        if asked is None or asked.sampling.seed is not None or config.enable_rollout_routing_replay:
            return None
        if (config.engine_kwargs.get("vllm") or {}).get("logits_processors"):
            return None
        processor: Any = self._running().output_processor
        for internal_id in processor.external_req_ids.get(request_id, ()):
            state = processor.request_states[internal_id]
            if state.detokenizer.num_output_tokens() <= known:
                continue
            output = state.make_request_output([], None, FinishReason.ABORT, None)
            if isinstance(output, RequestOutput) and len(output.outputs[0].token_ids) > known:
                return self._token_output(output, asked, "died", known)
        return None

    async def _seen(self, prompt_ids: Sequence[int], pictures: Sequence[Medium], request_id: str) -> EngineInput:
        what = f"{self._spec.name}: request {request_id}"
        if self._processor is None:
            raise RolloutError(f"{what} has pictures, and the model reads text alone")
        try:
            return await asyncio.to_thread(prompt_with, prompt_ids, pictures, self._processor)
        except (PictureError, ValueError) as exc:
            raise RolloutError(f"{what}: {exc}") from exc

    def _sampling_params(self, sampling: SamplingOptions) -> SamplingParams:
        stop = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self._eos))
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed,
            logprobs=0 if sampling.logprobs else None,  # 0: of the sampled token, and no others
            flat_logprobs=False,
            stop_token_ids=sorted(stop),
            ignore_eos=True,  # the model's end-of-sequence tokens are in stop_token_ids
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _token_output(self, output: RequestOutput, asked: Asked, reason: StopReason, known: int = 0) -> TokenOutput:
        """Without the first `known` tokens."""
        (sampled,) = output.outputs
        token_ids = list(sampled.token_ids[known:])
        log_probs: list[float] | None = None
        if asked.sampling.logprobs:
            positions: Any = (sampled.logprobs or [])[known:]
            log_probs = [position[token].logprob for position, token in zip(positions, token_ids, strict=True)]
        spans = tuple(
            WeightVersionSpan(max(span.start - known, 0), span.end - known, _version(span.version))
            for span in sampled.weight_versions or ()
            if span.end > known
        )
        cached = output.num_cached_tokens or 0
        answer = TokenOutput(
            token_ids,
            log_probs,
            reason,
            spans,
            sampled.routed_experts,
            cached_tokens=cached,
            reusable=self._in_whole_blocks(asked.num_prompt + len(sampled.token_ids) - 1),  # the last was not read
            seen=asked.seen,
        )
        if asked.now is None or asked.salt is None:
            begun_again = [span.start for span in (sampled.weight_versions or ())[1:] if span.start >= known]
            return replace(answer, computed_again=sum(asked.num_prompt + start for start in begun_again))
        # Weights may have changed since the request came: what it waited with counts as the older version's.
        oldest = version_of(asked.salt if cached else asked.now)
        return replace(answer, cache=asked.salt).on_cache_of(oldest)

    def _in_whole_blocks(self, tokens: int) -> int:
        """vLLM finds no other blocks again."""
        cache = self._running().vllm_config.cache_config
        return max(tokens, 0) // cache.block_size * cache.block_size if cache.enable_prefix_caching else 0

    async def pause(self, mode: str) -> None:
        llm = self._running()
        self._paused = True
        clear = self._salts is None
        if mode == "wait":
            await self._control(llm.pause_generation(mode="wait", clear_cache=clear))
            return
        # What `pause_generation` does, without the 20 ms that it then sleeps for answers to reach their requests: a
        # request that is aborted may get its tokens later, and generation would stand still meanwhile.
        await llm.renderer.clear_mm_cache_async()
        await self._control(llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear))

    async def resume(self) -> None:
        """Resume, unless the engine runs: running data-parallel ranks would then enter different collectives."""
        if self._paused:
            await self._control(self._running().resume_generation())
            self._paused = False

    async def activate(self, arena_path: str, version: int) -> EngineCheckResult | None:
        self._activating = True
        since, self._serves = self._serves, None
        try:
            if self._adapter_directory is None:
                await self._control(self._load(self._running(), arena_path, version, since))
            else:
                await self._control(self._load_adapters(self._running(), arena_path, version))
        except Exception:
            take_reports(self._reports, version)  # which raises what says more
            raise
        finally:
            self._activating = False
        checked = take_reports(self._reports, version)
        self._serves = version
        if self._salts is not None:
            self._salts.activated(version)
            if self._salts.outdated_by(version, loaded_since=since):
                await self.clear_cache()
        return checked

    async def _load(self, llm: AsyncLLM, arena_path: str, version: int, since: int | None) -> None:
        """All is asked for at once and done in this order: generation stands still, and round trips take time.

        Of several ranks the last alone raises what failed, and again when it shall finish; the others finish then.
        """
        reports = str(self._reports)
        update = {"arena_path": arena_path, "version": version, "since": since, "report_directory": reports}
        request = WeightTransferUpdateRequest(update_info=update)
        await asyncio.gather(
            llm.start_weight_update(),
            llm.update_weights(request),
            llm.finish_weight_update(),
            llm.update_weight_version(str(version)),
            *([self._reset_cache(llm)] if self._salts is None else []),
        )

    async def _load_adapters(self, llm: AsyncLLM, arena_path: str, version: int) -> None:
        """vLLM reads adapters from files, whole, before it lets go of those that it has."""
        assert self._adapter_directory is not None  # `activate` has looked
        with (
            open_to_activate(arena_path, version) as (_, view),
            adapter_files(self._adapter_directory, dict(view.tensors()), self._spec.model) as directory,
        ):
            try:
                await llm.add_lora(LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(directory), load_inplace=True))
            except Exception:
                if self._spec.config.tensor_model_parallel_size > 1:
                    # The answers of the ranks after the one that failed are unread, and would be taken for those to
                    # the next call. Nothing is lost with this engine: it is started again from the arena.
                    await self.shutdown()
                raise
            self._adapter = LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(directory))
        await llm.update_weight_version(str(version))
        if self._salts is None:
            await self._reset_cache(llm)

    async def clear_cache(self) -> None:
        await self._control(self._reset_cache(self._running()))
        if self._salts is not None:
            self._salts.cleared()

    async def _reset_cache(self, llm: AsyncLLM) -> None:
        """Requests frozen by pause("keep") are computed again from their tokens."""
        if not await llm.reset_prefix_cache(reset_running_requests=True):
            raise RolloutError(f"{self._spec.name}: vLLM did not reset its prefix cache")
        if self._processor is not None:  # pictures that the tower of another version has seen
            await llm.reset_encoder_cache()

    async def start_profile(self, prefix: str) -> None:
        await self._control(self._running().start_profile(prefix))

    async def stop_profile(self) -> None:
        await self._control(self._running().stop_profile())

    async def sleep(self, *, weights: bool) -> None:
        llm = self._running()
        # A version without the base weights cannot bring them back: level 1 moves the weights to the host's memory.
        level = 1 if self._spec.model.sends_adapters else 2
        self._serves = None if weights else self._serves
        await self._control(llm.sleep(level=level) if weights else llm.release_kv_cache_memory())
        if self._salts is not None:
            self._salts.cleared()

    async def wake(self, *, weights: bool) -> None:
        if await self._control(self._running().wake_up(tags=["weights"] if weights else ["kv_cache"])):
            self._paused = False  # vLLM goes on once nothing of it sleeps

    async def health(self) -> None:
        """Send the engine core a request, except while it loads weights and cannot answer."""
        llm = self._running()
        await self._control(llm.check_health() if self._activating else llm.get_weight_version())

    async def _control(self, call: Coroutine[Any, Any, T]) -> T:
        """What vLLM answers to a control call, or ReplicaDied."""
        try:
            return await controlled(self._running, call)
        except EngineDeadError as exc:
            raise ReplicaDied(f"{self._spec.name}: {self._died()}") from exc

    async def shutdown(self) -> None:
        llm, self._llm, self._serves = self._llm, None, None
        if llm is not None:
            llm.shutdown()
        if self._leftovers is not None:
            self._leftovers.remove()

    def _died(self) -> str:
        """What is known of it. Blocks for a moment the first time: calls may fail before the cause is told."""
        self._died_s = self._died_s or time.monotonic()
        while (worker := told_death(self._deaths, self._pids, self._spec.config.tensor_model_parallel_size)) is None:
            if time.monotonic() > self._died_s + TOLD_WITHIN_S:
                break
            time.sleep(LOOK_S)
        return f"the engine died: {worker}" if worker else "the engine died"

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise ReplicaDied(f"{self._spec.name}: the engine is not running")
        return self._llm


def _version(label: str) -> int:
    """vLLM calls the weights it started with `default`; ours are labelled with their number."""
    return int(label) if label.lstrip("-").isdigit() else NO_VERSION
