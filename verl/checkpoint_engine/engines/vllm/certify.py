"""The vLLM side of `certify`: an engine whose workers compare their tensors with vLLM's own load from disk."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.inputs import TokensPrompt
from vllm.model_executor.model_loader import get_model
from vllm.platforms import current_platform

from ...compat.vllm import own_rotary_tables
from ...parameter_server.endpoints import ENGINE_NAME
from ...ports import OnlyLoads
from ..leftovers import Leftovers
from .build import standing_alone
from .live import differences, live_tensors

CPU_CACHE_NBYTES = 2**28


class ComparedWorker:
    """The `worker_extension_cls` of the engine: vLLM mixes it into every worker."""

    vllm_config: Any
    model_runner: Any

    def compare_with_disk(self, directory: str) -> tuple[int, dict[str, str]]:
        """The number of the worker's tensors, and their differences to a model that vLLM loads from `directory`."""
        alone = standing_alone(self.vllm_config)
        alone.model_config = copy.copy(alone.model_config)
        alone.model_config.model = directory
        alone.load_config = LoadConfig()
        with set_current_vllm_config(alone), own_rotary_tables(), torch.no_grad():
            fresh = get_model(vllm_config=alone)
        live = live_tensors(self.model_runner.get_model())
        return len(live), differences(live, live_tensors(fresh))


class CertifiedEngine(OnlyLoads):
    """A `verl.checkpoint_engine.ports.Replica` over a real vLLM engine that starts from dummy weights."""

    name, node_index = "replica-0", 0

    def __init__(self, model: Path, *, dtype: str, ranks: int, max_model_len: int, check_engine: str) -> None:
        """Start the engine. Raises vLLM's error if it cannot run the model."""
        options: dict[str, Any] = {}
        if current_platform.is_cpu():
            cores = sorted(os.sched_getaffinity(0))
            share = max(len(cores) // ranks, 1)
            own = [cores[rank * share % len(cores) :][:share] for rank in range(ranks)]
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in own)
            options["kv_cache_memory_bytes"] = CPU_CACHE_NBYTES
        self._leftovers = Leftovers()
        os.environ["VLLM_RPC_BASE_PATH"] = str(self._leftovers.directory)
        try:
            with self._leftovers.taking_temporary_files(), self._leftovers.finding_shared_memory():
                self._llm = LLM(
                    model=str(model),
                    dtype=dtype,
                    load_format="dummy",
                    skip_tokenizer_init=True,
                    tensor_parallel_size=ranks,
                    enforce_eager=True,
                    max_model_len=max_model_len,
                    max_num_seqs=16,
                    enable_prefix_caching=False,
                    worker_extension_cls=f"{ComparedWorker.__module__}.{ComparedWorker.__name__}",
                    weight_transfer_config=WeightTransferConfig(backend=ENGINE_NAME),
                    **options,
                )
        except BaseException:
            self._leftovers.remove()
            raise
        self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"check_engine": check_engine}))

    async def activate(self, arena_path: str, version: int) -> None:
        await asyncio.to_thread(self._load, arena_path, version)

    def _load(self, arena_path: str, version: int) -> None:
        request = WeightTransferUpdateRequest(update_info={"arena_path": arena_path, "version": version})
        self._llm.start_weight_update()
        self._llm.update_weights(request)
        self._llm.finish_weight_update()
        self._llm.reset_prefix_cache()

    def compare_with_disk(self, directory: Path) -> tuple[int, dict[str, str]]:
        """As `ComparedWorker.compare_with_disk`, for all ranks. With several ranks, names begin with the rank."""
        answers = self._llm.collective_rpc("compare_with_disk", args=(str(directory),))
        if len(answers) == 1:
            count, different = answers[0]
            return count, different
        found = {f"rank {rank}: {name}": text for rank, (_, each) in enumerate(answers) for name, text in each.items()}
        return sum(count for count, _ in answers), found

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Generate `num_tokens` greedily for each prompt of token ids."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts], sampling, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        self._leftovers.remove()
