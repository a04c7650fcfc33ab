"""vLLM behind the port of `engine`, on the processor. vLLM's engine core is a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

from vllm import ModelRegistry, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import supports_lora
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from verl.checkpoint_engine.engines.leftovers import Leftovers
from verl.checkpoint_engine.errors import IntegrityError
from verl.tenants.base import Base, Shape
from verl.tenants.checkpoints import Version
from verl.tenants.engine import Drawing, Drawn, EngineDied
from verl.tenants.refused import Refused
from verl.tenants.vllm_extension import RPC_ADAPTABLE, RPC_HOLD, SUFFIXES, AdapterExtension, digest_of
from verl.workers.rollout.vllm.adapter import LARGEST_RANK, engine_rank
from verl.workers.rollout.vllm.control import LIVENESS_S, controlled
from verl.workers.rollout.vllm.cores import assign_cores, bind_single_worker
from verl.workers.rollout.vllm.refusals import told_in_a_line

T = TypeVar("T")

MOST_SEQUENCES = 32
"""At once. vLLM on the processor copies an adapter's unembedding for each of them."""
LARGEST_VOCABULARY = 258_048
"""For adapters of the unembedding."""
TEMPERATURES = 0.01, 2.0
"""vLLM samples with others than these as if they were other ones, or not at all."""

logger = logging.getLogger(__name__)


def why_not(base: Base, max_rank: int) -> str | None:
    """Why vLLM cannot sample with adapters of `base` of up to this rank; None if nothing is known against it."""
    if not current_platform.is_cpu():
        return f"this vLLM computes on {current_platform.device_type}, and adapters are served on the processor"
    if max_rank > LARGEST_RANK:
        return f"vLLM takes adapters of rank {LARGEST_RANK} at most, and --max-rank is {max_rank}"
    if _model_class(base) is None:
        return f"vLLM computes no adapters of {type(base.model).__name__}"
    if base.vocabulary > LARGEST_VOCABULARY:
        return f"vLLM computes adapters of unembeddings of at most {LARGEST_VOCABULARY} tokens, not {base.vocabulary}"
    return None


def why_not_every(base: Base) -> str | None:
    """As `why_not`, of those that are trained as clients ask by default, with the unembedding."""
    if "lm_head" in _model_class(base).embedding_modules:
        return None
    return f"vLLM computes no adapters of the unembedding of {type(base.model).__name__}"


def _model_class(base: Base) -> Any:
    registered = ModelRegistry.models.get(type(base.model).__name__)
    model = None if registered is None else registered.load_model_cls()
    return model if supports_lora(model) else None


class VLLMEngine:
    """One `AsyncLLM`, with the adapters that `Slots` has it hold."""

    def __init__(self, base: Base, *, slots: int, max_rank: int, kv_cache_gib: float) -> None:
        """Start it; blocks for half a minute. May be called in any thread.

        Raises ConfigError for settings that vLLM refuses, RolloutError if it does not start.
        """
        self.slots = slots
        self._base, self._max_rank = base, max_rank
        self._requests: dict[str, LoRARequest] = {}
        """By digest, of what is held."""
        self._unused: list[int] = []
        """Ids that the next load takes the places of: it is one call of the engine then."""
        self._ids, self._numbers = itertools.count(1), itertools.count()
        self._lacking: dict[str, str] = {}
        """Kinds of layers of which it has no places for adapters, with one of them."""
        cores = sorted(os.sched_getaffinity(0))
        bind_single_worker(os.environ, assign_cores(cores, replicas=2, ranks=1, replica=1)[0])
        self._leftovers = Leftovers()
        os.environ["VLLM_RPC_BASE_PATH"] = str(self._leftovers.directory)
        try:
            arguments = AsyncEngineArgs(**self._arguments(kv_cache_gib))
            with (
                told_in_a_line("--sampler vllm", "cpu", "--kv-cache-gib, or less --max-context"),
                self._leftovers.taking_temporary_files(),
                self._leftovers.finding_shared_memory(),
            ):
                self._llm: AsyncLLM | None = AsyncLLM.from_engine_args(arguments)
        except BaseException:
            self._leftovers.remove()
            raise

    def _arguments(self, kv_cache_gib: float) -> dict[str, Any]:
        context = self._base.context
        return {
            "model": str(self._base.directory),
            "skip_tokenizer_init": True,  # prompts and samples are token ids
            "dtype": str(self._base.model.dtype).removeprefix("torch."),
            "seed": secrets.randbits(31),
            "max_model_len": context,
            "max_num_seqs": MOST_SEQUENCES,
            # On the processor, vLLM cannot draw again for a request with a seed whose prompt it has cut.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(context, MOST_SEQUENCES),
            "enforce_eager": True,
            "logprobs_mode": "raw_logprobs",  # before temperature, top-k and top-p
            "generation_config": "vllm",  # what its authors sample with is not what a client asks for
            "kv_cache_memory_bytes": int(kv_cache_gib * 2**30),
            "distributed_executor_backend": "uni",
            "disable_log_stats": True,
            "enable_lora": True,
            # On the processor, vLLM 0.32 computes requests without an adapter with that of the last slot: none gets it.
            "max_loras": self.slots + 1,
            "max_cpu_loras": self.slots + 1,
            "max_lora_rank": engine_rank(self._max_rank),
            "worker_extension_cls": f"{AdapterExtension.__module__}.{AdapterExtension.__name__}",
        }

    async def check(self) -> None:
        adaptable = set((await self._control(self._running().collective_rpc(RPC_ADAPTABLE)))[0])
        for kind, layers in self._base.layers.items():
            self._lacking.update((kind, layer) for layer in layers if layer not in adaptable)

    def require(self, shape: Shape) -> None:
        for kind, layer in self._lacking.items():
            if getattr(shape, kind):
                raise Refused(
                    f"adapters of the {kind} are not sampled: vLLM computes none of {layer} of"
                    f" {type(self._base.model).__name__}; leave it out, or start the server with --sampler transformers"
                )
        if shape.rank > self._max_rank:
            raise Refused(f"adapters of rank {shape.rank} are not sampled: --max-rank is {self._max_rank}")

    async def load(self, version: Version) -> None:
        wanted = await asyncio.to_thread(self._wanted, version)
        request = LoRARequest(version.digest, next(self._ids), str(version.directory))
        asked = request.lora_path, request.lora_int_id, list(self._unused)
        self._unused.append(request.lora_int_id)  # unless it is found to be right
        held = (await self._control(self._running().collective_rpc(RPC_HOLD, args=asked)))[0]
        _check(version, wanted, held)
        self._unused.clear()
        self._requests[version.digest] = request

    def _wanted(self, version: Version) -> dict[str, str]:
        """Digests of what is to be computed with: vLLM scales the second tensor of each pair as it loads it."""
        dtype, scale = self._base.model.dtype, version.shape.alpha / version.shape.rank
        return {
            name: digest_of(tensor.to(dtype) if name.endswith(SUFFIXES[0]) else tensor.to(dtype) * scale)
            for name, tensor in version.tensors().items()
        }

    async def unload(self, digest: str) -> None:
        self._unused.append(self._requests.pop(digest).lora_int_id)

    async def draw(
        self, prompt: Sequence[int], drawing: Drawing, digest: str | None
    ) -> AsyncGenerator[Sequence[Drawn], None]:
        if drawing.temperature and not TEMPERATURES[0] <= drawing.temperature <= TEMPERATURES[1]:
            raise Refused(
                f"sampling_params.temperature={drawing.temperature} is not sampled by vLLM: 0, and"
                f" {TEMPERATURES[0]} to {TEMPERATURES[1]} are"
            )
        outputs = self._running().generate(
            TokensPrompt(prompt_token_ids=list(prompt)),
            _params(drawing),
            str(next(self._numbers)),
            lora_request=None if digest is None else self._requests[digest],
        )
        try:
            async for output in outputs:
                yield _drawn(output.outputs[0], drawing.likeliest)
        except EngineDeadError as exc:
            raise EngineDied("the engine died") from exc
        except EngineGenerateError as exc:
            await asyncio.sleep(LIVENESS_S)  # of a core that ends, requests may fail before vLLM knows that it has
            if not self._running().errored:
                raise
            raise EngineDied("the engine died") from exc
        finally:
            await outputs.aclose()

    async def _control(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await controlled(self._running, call)
        except EngineDeadError as exc:
            raise EngineDied("the engine died") from exc

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineDied("the engine was ended")
        return self._llm

    def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()
            self._leftovers.remove()


def _check(version: Version, wanted: dict[str, str], held: dict[str, str]) -> None:
    different = sorted(name for name in wanted.keys() | held.keys() if wanted.get(name) != held.get(name))
    if different:
        raise IntegrityError(
            f"vLLM does not compute with {version.path} as it is saved: {', '.join(different[:3])}"
            f"{f' and {len(different) - 3} more' if len(different) > 3 else ''} differ"
        )


def _params(drawing: Drawing) -> SamplingParams:
    return SamplingParams(
        max_tokens=drawing.max_tokens,
        temperature=drawing.temperature,
        top_k=drawing.top_k,
        top_p=drawing.top_p,
        seed=drawing.seed,
        logprobs=drawing.likeliest,
        stop_token_ids=sorted({token for token in drawing.stop_tokens if 0 <= token < 2**31}),  # others never come
        ignore_eos=True,  # the model's end tokens are stop tokens
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if drawing.stream else RequestOutputKind.FINAL_ONLY,
    )


def _drawn(output: Any, likeliest: int) -> list[Drawn]:
    if output.finish_reason not in (None, "stop", "length"):
        raise RuntimeError(f"vLLM ended a request with {output.finish_reason!r}")
    places = zip(output.token_ids, output.logprobs or (), strict=True)
    return [Drawn(token, place[token].logprob, _likeliest(place, likeliest)) for token, place in places]


def _likeliest(place: dict[int, Any], number: int) -> list[tuple[int, float]]:
    """vLLM tells the drawn token, too, if it is none of them."""
    ranked = sorted(place.items(), key=lambda each: each[1].rank)
    return [(token, each.logprob) for token, each in ranked[:number]]
