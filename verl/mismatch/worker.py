"""The engine's side: an extension of vLLM's workers that records what modules get and return, token by token.

Recording happens between `begin_recording` and `end_recording`. Responses may be given: the worker then samples their
tokens, whatever the distribution, and everything else in the engine is as in service.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl.checkpoint_engine.engines.vllm.certify import ComparedWorker
from verl.mismatch.places import (
    ATTENTION,
    IDS,
    LOG_PROBS,
    LOGITS,
    POSITIONS,
    SUM,
    entered,
    modules_of,
    states_in,
    states_out,
    tokens_first,
)

Step = dict[str, Any]


def sequence_of(request_id: str) -> int:
    """The number of the sequence of a request. vLLM appends characters of its own to the id that it is given."""
    return int(request_id.split("-")[0].removeprefix("s"))


class Probe(ComparedWorker):
    """The `worker_extension_cls` of the engine: vLLM mixes it into every worker."""

    def begin_recording(self, names: Sequence[str], sequences: Sequence[Sequence[int]]) -> list[str]:
        """Record from now on at the modules that have `names`; returns the names of those that exist.

        `sequences`: token ids of prompt and response by number; what a prompt alone is there for is sampled freely.
        """
        self._recorder = _Recorder(self.model_runner, sequences)
        return self._recorder.hook(names)

    def end_recording(self, path: str) -> int:
        """Write the steps to `path` with the worker's rank in place of `{}`; returns their number."""
        recorder = self._recorder
        recorder.close()
        torch.save(recorder.steps, path.format(getattr(self, "rank", 0)))
        return len(recorder.steps)


class _Recorder:
    def __init__(self, runner: Any, sequences: Sequence[Sequence[int]]) -> None:
        self.steps: list[Step] = []
        self._runner = runner
        self._sequences = sequences
        self._undo: list[Callable[[], None]] = []

    def hook(self, names: Sequence[str]) -> list[str]:
        model = self._runner.get_model()
        modules = modules_of(model)
        found = [name for name in names if name in modules]
        self._add(model.register_forward_pre_hook(self._step_begins, with_kwargs=True))
        for name in found:
            module = modules[name]
            self._add(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            self._add(module.register_forward_hook(self._leaving(name)))
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in ("attn", "paged") and hasattr(module, "impl"):
                place = name[name.find("layers.") :].rpartition(".")[0]
                self._add(module.register_forward_pre_hook(self._attending(place), with_kwargs=True))
                self._add(module.register_forward_hook(self._attended(place)))
        self._replace(model, "compute_logits", self._scores(model.compute_logits))
        self._replace(self._runner.sampler, "sample", self._sample(self._runner.sampler.sample))
        return found

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _add(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        before = vars(owner).get(name)
        object.__setattr__(owner, name, function)
        if before is None:
            self._undo.append(lambda: object.__delattr__(owner, name))
        else:
            self._undo.append(lambda: object.__setattr__(owner, name, before))

    def _step_begins(self, model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        runner = self._runner
        batch = runner.input_batch
        rows: list[tuple[int, int]] = []
        for index, request in enumerate(batch.req_ids):
            start, stop = (int(each) for each in runner.query_start_loc.np[index : index + 2])
            first = int(batch.num_computed_tokens_cpu[index])
            rows += [(sequence_of(request), first + offset) for offset in range(stop - start)]
        self.steps.append({"rows": rows, "last": {}})
        given = dict(zip(("input_ids", "positions"), arguments, strict=False)) | options
        for name in (IDS, POSITIONS):
            if isinstance(given.get(name), torch.Tensor):
                self._keep(name, given[name].flatten() if given[name].dim() == 1 else given[name][0])

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        """A copy of the rows of the step's tokens: vLLM's kernels write into what they got."""
        step = self.steps[-1]
        count = len(step["rows"])
        rows = tokens_first(tensor.detach(), count)
        rows = rows if len(rows) >= count and rows.dim() < 4 else rows[0]
        if len(rows) >= count:  # else tokens are not its rows, and it cannot be compared
            step[name] = (rows if rows.dim() == 1 else rows.flatten(1))[:count].to("cpu", copy=True)

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            for suffix, states in zip(("", SUM), states_in(arguments, options), strict=False):
                self._keep(f">{name}{suffix}", states)
                if (also := entered(name)) is not None:
                    self._keep(f"{also}{suffix}", states)

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: Any, arguments: tuple[Any, ...], returned: Any) -> None:
            for suffix, states in zip(("", SUM), states_out(returned), strict=False):
                self._keep(f"{name}{suffix}", states)

        return leave

    def _attending(self, place: str) -> Callable[..., None]:
        def attend(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            given = dict(zip(ATTENTION, arguments, strict=False)) | options
            for name in ATTENTION[:3]:
                if isinstance(given.get(name), torch.Tensor):
                    self._keep(f"{place}.{name}", given[name].reshape(given[name].shape[0], -1))

        return attend

    def _attended(self, place: str) -> Callable[..., None]:
        def leave(module: Any, arguments: tuple[Any, ...], returned: torch.Tensor) -> None:
            self._keep(f"{place}.{ATTENTION[3]}", returned.reshape(returned.shape[0], -1))

        return leave

    def _last(self) -> list[tuple[int, int]]:
        """(sequence, index) of each request's last token in the step, in the order of the rows of its scores."""
        return list(dict(self.steps[-1]["rows"]).items())

    def _scores(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compute_logits(*arguments: Any, **options: Any) -> Any:
            logits = original(*arguments, **options)
            if logits is not None and self.steps:
                self.steps[-1]["last"][LOGITS] = logits.detach().to("cpu", copy=True)
                self.steps[-1]["last"]["rows"] = self._last()
            return logits

        return compute_logits

    def _sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample(logits: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            sampled, log_probs = original(logits, *arguments, **options)
            if self.steps and log_probs is not None:
                self.steps[-1]["last"][LOG_PROBS] = log_probs.detach().float().to("cpu", copy=True)
            for row, (sequence, index) in enumerate(self._last() if self.steps else ()):
                known = self._sequences[sequence]
                if index + 1 < len(known):
                    sampled[row] = known[index + 1]
            return sampled, log_probs

        return sample
