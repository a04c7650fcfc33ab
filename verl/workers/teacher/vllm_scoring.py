"""vLLM as a teacher: it loads its model's own weights, and computes log-probs of a student's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from verl.workers.rollout.engine import EngineSpec
from verl.workers.rollout.errors import ReplicaDied, RolloutError
from verl.workers.rollout.vllm.engine import VLLMEngine
from verl.workers.teacher.scores import Scores


class ScoringEngine(VLLMEngine):
    """One `AsyncLLM` that reads its weights from the model's directory and keeps them."""

    def __init__(self, spec: EngineSpec, num_candidates: int) -> None:
        super().__init__(spec)
        self._num_candidates = num_candidates

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | {
            "logprobs_mode": "raw_logprobs",  # at temperature 1, whatever the student samples at
            "max_logprobs": max(self._num_candidates, 1),
        }

    async def score(self, token_ids: Sequence[int], count: int, request_id: str) -> Scores:
        """Score the last `count` of the tokens. Raises RolloutError, ReplicaDied."""
        prompt, final = TokensPrompt(prompt_token_ids=list(token_ids)), None
        sampling = SamplingParams(
            max_tokens=1,  # vLLM generates at least one
            prompt_logprobs=self._num_candidates,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        try:
            async for output in self._running().generate(prompt, sampling, request_id):
                final = output
        except EngineDeadError as exc:
            raise ReplicaDied(f"{self._spec.name}: {self._died()} during request {request_id}") from exc
        return self._scores(final, token_ids, count)

    def _scores(self, final: RequestOutput | None, token_ids: Sequence[int], count: int) -> Scores:
        told: Any = None if final is None else final.prompt_logprobs
        width = 1 + self._num_candidates
        if told is None or len(told.logprobs) != (len(token_ids) - 1) * width:
            what = f"{width} log-probs of each of {len(token_ids)} tokens"
            raise RolloutError(f"{self._spec.name}: vLLM did not return {what}")
        ids = np.asarray(told.token_ids, dtype=np.int32).reshape(-1, width)[-count:]
        log_probs = np.asarray(told.logprobs, dtype=np.float32).reshape(-1, width)[-count:]
        if not np.array_equal(ids[:, 0], np.asarray(token_ids[-count:])):  # the token itself comes first
            raise RolloutError(f"{self._spec.name}: vLLM returned log-probs of other tokens than the requested ones")
        return Scores(log_probs[:, 0], ids[:, 1:], log_probs[:, 1:])
