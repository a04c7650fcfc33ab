"""vLLM as it serves, whose workers record what they compute."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform

from verl.checkpoint_engine.engines.leftovers import Leftovers
from verl.mismatch.recorder import request_id
from verl.mismatch.recording import Recording, Sampling, assembled
from verl.mismatch.vllm.worker import Probe
from verl.workers.rollout.vllm.cores import assign_cores, omp_threads_bind
from verl.workers.rollout.vllm.exact import ARCHITECTURE, ExactWorker, register

CPU_CACHE_NBYTES = 2**28

PROBE = f"{Probe.__module__}.{Probe.__name__}"


class ProbedVLLM:
    """See `verl.mismatch.engine.ProbedEngine`."""

    def __init__(
        self,
        model: Path,
        *,
        dtype: str,
        ranks: int = 1,
        max_model_len: int,
        extension: str = PROBE,
        exact: bool = False,
    ) -> None:
        """Start the engine; `exact`: with the trainer's own modules. Raises vLLM's error if it cannot run the model."""
        settings: dict[str, Any] = {}
        if exact:
            register()
            settings["worker_cls"] = f"{ExactWorker.__module__}.{ExactWorker.__name__}"
            settings["hf_overrides"] = {"architectures": [ARCHITECTURE]}
        if current_platform.is_cpu():
            cores = assign_cores(sorted(os.sched_getaffinity(0)), replicas=1, ranks=ranks, replica=0)
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = omp_threads_bind(cores)
            settings["kv_cache_memory_bytes"] = CPU_CACHE_NBYTES
            if ranks == 1:  # it needs no process of its own
                os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
                os.environ["OMP_NUM_THREADS"] = str(len(cores[0]))
                settings["distributed_executor_backend"] = "uni"
        self._leftovers = Leftovers()
        os.environ["VLLM_RPC_BASE_PATH"] = str(self._leftovers.directory)
        try:
            with self._leftovers.taking_temporary_files(), self._leftovers.finding_shared_memory():
                self._llm = LLM(
                    model=str(model),
                    dtype=dtype,
                    skip_tokenizer_init=True,
                    tensor_parallel_size=ranks,
                    enforce_eager=True,
                    max_model_len=max_model_len,
                    max_num_seqs=16,
                    enable_prefix_caching=False,
                    async_scheduling=False,
                    logprobs_mode="processed_logprobs",
                    generation_config="vllm",
                    worker_extension_cls=extension,
                    **settings,
                )
        except BaseException:
            self._leftovers.remove()
            raise
        self._ranks = ranks

    def call(self, method: str, *arguments: Any) -> list[Any]:
        answers: list[Any] = self._llm.collective_rpc(method, args=arguments)
        return answers

    def compare_with_disk(self, directory: Path) -> dict[str, str]:
        answers = self.call("compare_with_disk", str(directory))
        if len(answers) == 1:
            return dict(answers[0][1])
        return {f"rank {rank}: {name}": text for rank, (_, each) in enumerate(answers) for name, text in each.items()}

    def record(
        self,
        names: Sequence[str],
        sequences: Sequence[Sequence[int]],
        prompts: Sequence[int],
        sampling: Sampling,
        *,
        new_tokens: int,
    ) -> Recording:
        self.call("begin_recording", list(names), [list(each) for each in sequences])
        engine = self._llm.llm_engine
        for number, (tokens, prompt) in enumerate(zip(sequences, prompts, strict=True)):
            options = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                repetition_penalty=sampling.repetition_penalty,
                max_tokens=len(tokens) - prompt or new_tokens,
                seed=number,
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
            )
            engine.add_request(request_id(number), TokensPrompt(prompt_token_ids=list(tokens[:prompt])), options)
        found: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = list(output.outputs[0].token_ids)
        pattern = str(self._leftovers.directory / "rank-{}.pt")
        self.call("end_recording", pattern)
        ranks = [torch.load(pattern.format(rank), mmap=False, weights_only=True) for rank in range(self._ranks)]
        whole = [
            [*tokens[:prompt], *found[request_id(number)]]
            for number, (tokens, prompt) in enumerate(zip(sequences, prompts, strict=True))
        ]
        return assembled(ranks, Recording(tokens=whole, prompts=list(prompts)))

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        self._leftovers.remove()
