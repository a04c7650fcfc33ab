"""An extension of vLLM's workers that records what modules get and return, between `begin_recording` and
`end_recording`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl.checkpoint_engine.engines.vllm.certify import ComparedWorker
from verl.mismatch.recorder import Recorder, sequence_of


class Probe(ComparedWorker):
    """The `worker_extension_cls` of the engine: vLLM mixes it into every worker."""

    def begin_recording(self, names: Sequence[str], sequences: Sequence[Sequence[int]]) -> list[str]:
        """Record from now on at the modules that have `names`; returns the names of those that exist.

        `sequences`: token ids of prompt and response by number; what a prompt alone is there for is sampled freely.
        """
        self._recorder = _VLLMRecorder(self.model_runner, sequences)
        return self._recorder.hook(names)

    def end_recording(self, path: str) -> int:
        """Write the steps to `path` with the worker's rank in place of `{}`; returns their number."""
        recorder = self._recorder
        recorder.close()
        torch.save(recorder.steps, path.format(getattr(self, "rank", 0)))
        return len(recorder.steps)


class _VLLMRecorder(Recorder):
    def __init__(self, runner: Any, sequences: Sequence[Sequence[int]]) -> None:
        super().__init__(runner.get_model(), sequences)
        self._runner = runner

    def hook(self, names: Sequence[str]) -> list[str]:
        model: Any = self._model
        self._add(model.register_forward_pre_hook(self._step_begins, with_kwargs=True))
        kernels = [
            (name, module)
            for name, module in model.named_modules()
            if name.rpartition(".")[2] in ("attn", "paged") and hasattr(module, "impl")
        ]
        found = self.hook_modules(names, kernels)
        self._replace(model, "compute_logits", self._scores(model.compute_logits))
        self._replace(self._runner.sampler, "sample", self._sample(self._runner.sampler.sample))
        return found

    def _step_begins(self, model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        runner = self._runner
        batch = runner.input_batch
        rows: list[tuple[int, int]] = []
        for index, request in enumerate(batch.req_ids):
            start, stop = (int(each) for each in runner.query_start_loc.np[index : index + 2])
            first = int(batch.num_computed_tokens_cpu[index])
            rows += [(sequence_of(request), first + offset) for offset in range(stop - start)]
        self.begin(rows, arguments, options)

    def _scores(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compute_logits(*arguments: Any, **options: Any) -> Any:
            logits = original(*arguments, **options)
            if logits is not None:
                self.scores(logits)
            return logits

        return compute_logits

    def _sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample(logits: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            tokens, log_probs = original(logits, *arguments, **options)
            self.sampled(tokens, log_probs)
            return tokens, log_probs

        return sample
