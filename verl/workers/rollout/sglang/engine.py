"""SGLang behind the `Engine` port. The one file that imports SGLang; runs in the server process only."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil
import torch
from sglang.srt.entrypoints.engine import Engine as SGLang
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer

from verl.checkpoint_engine.engines.leftovers import Leftovers
from verl.checkpoint_engine.engines.sglang.orders import LOADER, Order, Report, checked, read_reports, reports_of
from verl.checkpoint_engine.errors import ActivationError
from verl.checkpoint_engine.plan.types import EngineCheckResult
from verl.utils.config import ConfigError
from verl.utils.model import load_hf_config
from verl.utils.pictures import Medium, PictureError, PictureProcessor, load_processor
from verl.workers.rollout.engine import EngineSpec, eos_token_ids
from verl.workers.rollout.errors import ReplicaDied, RolloutError
from verl.workers.rollout.records import NO_VERSION, SamplingOptions, StopReason, TokenOutput, WeightVersionSpan
from verl.workers.rollout.sglang.pictures import inputs_of
from verl.workers.rollout.sglang.room import kv_cache_tokens

logger = logging.getLogger(__name__)

T = TypeVar("T")

LIVENESS_S = 0.5
"""How often a control call that takes long asks whether the schedulers are alive."""
AGAIN_S = 0.02
"""Until requests that had not reached the scheduler yet are told again to end."""
SPARE_TOKENS = 8
"""Extra context length: SGLang ends a response a little before its context is full. The server enforces the limit."""
FLUSHED_WITHIN_S = 10.0
ON_CPU = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,  # it would look for requests as fast as it can, on a core that others need
}
"""SGLang's arguments on a machine without an accelerator."""
STOP_REASONS: dict[str, StopReason] = {"stop": "completed", "length": "length", "abort": "aborted"}


@dataclass(slots=True)
class Asked:
    """A request that SGLang has."""

    logprobs: bool
    seen: tuple[str, ...]
    """Digests of its prompt's pictures."""
    filtered: bool
    """By top-k or top-p: SGLang's own log-probs are those before, and what it keeps it tells apart."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has ended."""
    spans: list[WeightVersionSpan] = field(default_factory=list)
    """Of its tokens of versions before the present one. SGLang tells them at the end alone."""


class SGLangEngine:
    """One SGLang engine whose weights come from a node arena. See `verl.workers.rollout.engine.Engine`."""

    sees: Literal[True] = True
    tells: Literal[True] = True

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._eos: tuple[int, ...] = ()
        self._sglang: SGLang | None = None
        self._processor: PictureProcessor | None = None
        """Of a model that sees."""
        self._schedulers: list[psutil.Process] = []
        self._leftovers: Leftovers | None = None
        self._reports = Path()
        """Where ranks answer orders."""
        self._open = asyncio.Event()
        """Requests may be given to SGLang. While they may not they wait here, where nothing has to be told of them."""
        self._running: dict[str, Asked] = {}
        """By id."""
        self._version = NO_VERSION
        self._keeps = False
        """SGLang has been told to pause, with requests in its queue."""
        self._has_checked = False

    # -- start and end ----------------------------------------------------------------------------------------------

    async def start(self) -> tuple[str, ...]:
        """Start SGLang. Blocks the engine loop, which has no other work before."""
        spec = self._spec
        self._eos = eos_token_ids(spec.model)
        self._processor = load_processor(spec.model.path, load_hf_config(spec.model))
        if spec.device == "cpu":
            cores = len(os.sched_getaffinity(0)) // spec.local_count
            os.environ["OMP_NUM_THREADS"] = str(max(1, cores))
        self._leftovers = Leftovers()
        self._reports = self._leftovers.directory / "reports"
        self._reports.mkdir()
        with self._leftovers.taking_temporary_files(), self._leftovers.finding_shared_memory():
            try:
                self._sglang = SGLang(**self._arguments())
            except (ValueError, AssertionError) as exc:
                raise ConfigError(f"{spec.name}: SGLang refuses its settings: {exc}") from exc
            except RuntimeError as exc:
                raise RolloutError(f"{spec.name}: SGLang did not start: {exc}") from exc
        self._schedulers = [psutil.Process(pid) for pid in self._sglang.get_all_child_pids()]
        self._open.set()
        wide = await self._carry_out(Order(reports=str(self._reports), directory=spec.model.path))
        return tuple(sorted({name for report in wide.values() for name in report.widened}))

    def _arguments(self) -> dict[str, Any]:
        spec, config = self._spec, self._spec.config
        chunk = max(config.max_num_batched_tokens, spec.max_model_len)
        arguments: dict[str, Any] = {
            "model_path": spec.model.path,
            "skip_tokenizer_init": True,  # prompts and responses are token ids
            "trust_remote_code": spec.model.trust_remote_code,
            "device": spec.device,
            "dtype": config.dtype,
            "load_format": config.load_format,
            "random_seed": spec.seed,
            "tp_size": config.tensor_model_parallel_size,
            "context_length": spec.max_model_len + SPARE_TOKENS,
            "max_running_requests": config.max_num_seqs,
            "max_prefill_tokens": chunk,
            "chunked_prefill_size": chunk if config.enable_chunked_prefill else -1,
            "disable_radix_cache": not config.enable_prefix_caching,
            "disable_cuda_graph": config.enforce_eager or spec.device == "cpu",
            "enable_memory_saver": spec.can_sleep,
            "custom_weight_loader": [LOADER],
            "log_level": "error",
        }
        if spec.model.override_config:
            arguments["json_model_override_args"] = json.dumps(dict(spec.model.override_config))
        if spec.device == "cpu":
            arguments |= {"max_total_tokens": kv_cache_tokens(spec)} | ON_CPU
        else:
            arguments["mem_fraction_static"] = config.gpu_memory_utilization
        return arguments | (config.engine_kwargs.get("sglang") or {})

    async def shutdown(self) -> None:
        sglang, self._sglang = self._sglang, None
        if sglang is not None:
            sglang.shutdown()
        if self._leftovers is not None:
            self._leftovers.remove()

    async def health(self) -> None:
        self._require_alive()

    # -- generation -------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingOptions, request_id: str, pictures: Sequence[Medium] = ()
    ) -> TokenOutput:
        if sampling.seed is not None:
            raise RolloutError(
                f"{self._spec.name}: request {request_id} has a seed: SGLang takes none per request (rollout.seed)"
            )
        if sampling.ignore_eos and sampling.stop_token_ids:
            raise RolloutError(
                f"{self._spec.name}: request {request_id}: of ignore_eos and stop_token_ids SGLang takes one"
            )
        image_data = await self._seen(prompt_ids, pictures, request_id)
        seen = self._processor.digests(pictures) if self._processor is not None else ()
        await self._alive(self._open.wait())
        filtered = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)
        asked = self._running[request_id] = Asked(sampling.logprobs, seen, filtered)
        try:
            return await self._alive(self._generate(prompt_ids, sampling, request_id, asked, image_data))
        except ReplicaDied:
            if (rest := self.so_far(request_id, 0)) is None:
                raise
            return rest
        finally:
            del self._running[request_id]
            asked.ended.set()

    async def _seen(
        self, prompt_ids: Sequence[int], pictures: Sequence[Medium], request_id: str
    ) -> list[dict[str, Any]] | None:
        if not pictures:
            return None
        what = f"{self._spec.name}: request {request_id}"
        if self._processor is None:
            raise RolloutError(f"{what} has pictures, and the model reads text alone")
        try:
            return [await asyncio.to_thread(inputs_of, prompt_ids, pictures, self._processor)]
        except (PictureError, ValueError) as exc:
            raise RolloutError(f"{what}: {exc}") from exc

    async def _generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingOptions,
        request_id: str,
        asked: Asked,
        image_data: list[dict[str, Any]] | None,
    ) -> TokenOutput:
        request = GenerateReqInput(
            rid=request_id,
            input_ids=list(prompt_ids),
            image_data=image_data,
            sampling_params={
                "max_new_tokens": min(sampling.max_tokens, self._spec.max_model_len - len(prompt_ids)),
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "stop_token_ids": sorted({*sampling.stop_token_ids, *self._eos}),
                "ignore_eos": sampling.ignore_eos,
            },
            return_logprob=sampling.logprobs,
            return_sampling_mask=asked.logprobs and asked.filtered,
        )
        try:
            answers = [answer async for answer in self._manager.generate_request(request, None)]
        except asyncio.CancelledError:
            self._manager.abort_request(request_id)
            raise
        except ValueError as exc:
            raise RolloutError(f"{self._spec.name}: SGLang refuses request {request_id}: {exc}") from exc
        if not answers:
            raise RolloutError(f"{self._spec.name}: request {request_id} ended without an answer from SGLang")
        return self._token_output(answers[-1], request_id, asked)

    def _token_output(self, answer: dict[str, Any], request_id: str, asked: Asked) -> TokenOutput:
        about = answer.get("meta_info", {})
        reason = (about.get("finish_reason") or {}).get("type")
        if reason not in STOP_REASONS:
            raise RolloutError(f"{self._spec.name}: request {request_id} ended with {reason!r}")
        tokens = list(answer.get("output_ids") or ())
        log_probs: list[float] | None = None
        if asked.logprobs:
            told = about.get("output_token_logprobs") or ()
            log_probs = [log_prob for log_prob, *_ in told]
            if asked.filtered:
                log_probs = [float(log_prob) for log_prob in about.get("output_token_sampling_logprobs") or ()]
            if len(log_probs) != len(tokens):
                raise RolloutError(
                    f"{self._spec.name}: request {request_id} has {len(tokens)} tokens and {len(log_probs)} log-probs"
                )
        spans = tuple(
            WeightVersionSpan(span["start"], span["end"], _version(span["version"]))
            for span in about.get("weight_versions") or ()
            if span["end"] > span["start"]
        )
        return TokenOutput(tokens, log_probs, STOP_REASONS[reason], spans, seen=asked.seen)

    def so_far(self, request_id: str, known: int) -> TokenOutput | None:
        """See `TellingEngine`. A scheduler that stands still has told of all its tokens: see `TELLS`."""
        asked, state = self._running.get(request_id), self._state(request_id)
        if asked is None or state is None or len(state.output_ids) <= known:
            return None
        log_probs = state.output_token_sampling_logprobs if asked.filtered else state.output_token_logprobs_val
        spans = [*asked.spans, self._span_of_present(asked, len(state.output_ids))]
        return TokenOutput(
            state.output_ids[known:],
            [float(log_prob) for log_prob in log_probs[known:]] if asked.logprobs else None,
            "died",
            tuple(
                WeightVersionSpan(max(span.start - known, 0), span.stop - known, span.version)
                for span in spans
                if span.stop > max(known, span.start)
            ),
            seen=asked.seen,
        )

    def _span_of_present(self, asked: Asked, stop: int) -> WeightVersionSpan:
        return WeightVersionSpan(asked.spans[-1].stop if asked.spans else 0, stop, self._version)

    def _state(self, request_id: str) -> Any:
        """What SGLang's client has of a request."""
        return self._sglang.tokenizer_manager.rid_to_state.get(request_id) if self._sglang is not None else None

    async def pause(self, mode: str) -> None:
        """With `keep`, SGLang returns requests to its queue, and later computes them again from their tokens.

        Without requests it is not paused: none can arrive, and a paused scheduler polls without sleep.
        """
        self._open.clear()
        if mode == "abort":
            while self._running:
                self._manager.abort_request(abort_all=True)
                await self._ended(AGAIN_S)
        elif mode == "wait":
            await self._go_on()
            while self._running:
                await self._ended(LIVENESS_S)
                self._require_alive()
        if self._running:
            self._keeps = True
            await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        else:
            await self._go_on()
        await self._flush()  # answered when the scheduler has stopped

    async def resume(self) -> None:
        await self._go_on()
        self._open.set()

    async def _go_on(self) -> None:
        if self._keeps:
            self._keeps = False
            await self._manager.continue_generation(ContinueGenerationReqInput())

    async def clear_cache(self) -> None:
        if not self._open.is_set():
            await self._flush()
            return
        await self.pause("keep")
        await self.resume()

    async def _ended(self, timeout_s: float) -> None:
        """Until what runs now has ended, or `timeout_s` has passed."""
        waiting = [asyncio.ensure_future(asked.ended.wait()) for asked in self._running.values()]
        await asyncio.wait(waiting, timeout=timeout_s)
        for task in waiting:
            task.cancel()

    async def _flush(self) -> None:
        """While paused. A batch whose requests have all ended may be there for another turn of the scheduler's loop.

        SGLang's own waiting, `flush_cache(timeout_s=...)`, is for a queue without requests, also while it is paused.
        """
        deadline = time.monotonic() + FLUSHED_WITHIN_S
        while not (flushed := await self._alive(self._manager.flush_cache())).success:
            if time.monotonic() > deadline:
                raise RolloutError(f"{self._spec.name}: SGLang did not flush its cache: {flushed.message}")
            await asyncio.sleep(AGAIN_S)

    # -- weights ----------------------------------------------------------------------------------------------------

    async def activate(self, arena_path: str, version: int) -> EngineCheckResult | None:
        when = self._spec.config.checkpoint_engine.get("check_engine", "first")
        check = when == "always" or (when == "first" and not self._has_checked)
        order = Order(reports=str(self._reports), arena_path=arena_path, version=version, check=check)
        found = checked(await self._carry_out(order), order)
        self._has_checked |= check
        for request_id, asked in self._running.items():
            if (state := self._state(request_id)) is not None and state.output_ids:
                asked.spans.append(self._span_of_present(asked, len(state.output_ids)))
        self._version = version
        await self._flush()
        return found

    async def _carry_out(self, order: Order) -> dict[int, Report]:
        """Have every rank carry out `order`. Raises ActivationError; the engine's weights may be torn then."""
        ranks = self._spec.config.tensor_model_parallel_size
        payload = MultiprocessingSerializer.serialize([(order.encode(), torch.empty(0))])
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload] * ranks,
            load_format=LOADER,
            flush_cache=False,
            weight_version=str(order.version) if order.arena_path else None,
        )
        await self._told(self._manager.begin_weight_update(BeginWeightUpdateReqInput()))
        try:
            await self._told(self._manager.update_weights_from_tensor(update))
        finally:
            await self._told(self._manager.end_weight_update(EndWeightUpdateReqInput()))
        return reports_of(read_reports(self._reports), ranks)

    async def _told(self, call: Coroutine[Any, Any, tuple[bool, str]]) -> None:
        success, message = (await self._alive(call))[:2]
        if not success:
            raise ActivationError(f"SGLang refuses the update: {message}")

    async def sleep(self, *, weights: bool) -> None:
        tags = ["kv_cache", "weights"] if weights else ["kv_cache"]
        await self._alive(self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags)))

    async def wake(self, *, weights: bool) -> None:
        tags = ["weights"] if weights else ["kv_cache"]
        await self._alive(self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags)))

    # -- liveness ---------------------------------------------------------------------------------------------------

    async def _alive(self, call: Coroutine[Any, Any, T]) -> T:
        """What SGLang answers, or ReplicaDied: it would be waited for for ever when a scheduler is gone."""
        answer = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([answer], timeout=LIVENESS_S))[0]:
                self._require_alive()
            return answer.result()
        finally:
            answer.cancel()

    def _require_alive(self) -> None:
        for process in self._schedulers:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise ReplicaDied(f"{self._spec.name}: the engine died")

    @property
    def _manager(self) -> Any:
        if self._sglang is None:
            raise ReplicaDied(f"{self._spec.name}: the engine is not running")
        return self._sglang.tokenizer_manager


def _version(label: str) -> int:
    """SGLang calls the weights it started with `default`; ours are labelled with their number."""
    return int(label) if label.lstrip("-").isdigit() else NO_VERSION
