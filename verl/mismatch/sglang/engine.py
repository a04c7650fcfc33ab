"""SGLang as it serves, whose ranks record what they compute."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from sglang.srt.entrypoints.engine import Engine

from verl.checkpoint_engine.engines.leftovers import Leftovers
from verl.checkpoint_engine.support.lifetime import kill_children
from verl.mismatch.recorder import request_id
from verl.mismatch.recording import Recording, Sampling, assembled
from verl.mismatch.sglang.rank import LOADER, Probe
from verl.workers.rollout.sglang.engine import ON_CPU, SPARE_TOKENS

CPU_CACHE_TOKENS = 4096
T = TypeVar("T")


def _died(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise RuntimeError("one of its processes ended; what it said is above")


class _Aside:
    """A thread for SGLang: on the main thread it would install handlers that kill this process without a word, or
    ignore SIGTERM. Its processes tell the main thread by SIGQUIT that they failed."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._before = signal.signal(signal.SIGQUIT, _died)
        Thread(target=self._run, name="sglang", daemon=True).start()

    def __call__(self, function: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._calls.put((function, future))
        return future.result()

    def end(self) -> None:
        signal.signal(signal.SIGQUIT, self._before)

    def _run(self) -> None:
        while True:
            function, future = self._calls.get()
            try:
                future.set_result(function())
            except BaseException as exc:  # noqa: BLE001 - for whoever called
                future.set_exception(exc)


PROBE = f"{Probe.__module__}.{Probe.__name__}"


class ProbedSGLang:
    """See `verl.mismatch.engine.ProbedEngine`."""

    def __init__(self, model: Path, *, dtype: str, max_model_len: int, vocab_size: int, extension: str = PROBE) -> None:
        """Start the engine. Raises SGLang's error if it cannot run the model."""
        self._extension = extension
        settings: dict[str, Any] = {}
        if not torch.cuda.is_available():
            os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
            settings = ON_CPU | {"device": "cpu", "max_total_tokens": max(CPU_CACHE_TOKENS, 16 * max_model_len)}
        arguments = {
            "model_path": str(model),
            "dtype": dtype,
            "skip_tokenizer_init": True,
            "context_length": max_model_len + SPARE_TOKENS,
            "max_running_requests": 16,
            "max_prefill_tokens": 16 * max_model_len,
            "chunked_prefill_size": 16 * max_model_len,
            "disable_radix_cache": True,
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "sampling_mask_max_tokens": vocab_size,  # what it samples from is recorded whole
            "custom_weight_loader": [LOADER],
            "log_level": "error",
        }
        self._leftovers = Leftovers()
        self._aside = _Aside()
        try:
            with self._leftovers.taking_temporary_files(), self._leftovers.finding_shared_memory():
                self._sglang = self._aside(lambda: Engine(**arguments | settings))
        except BaseException:
            kill_children()
            self._aside.end()
            self._leftovers.remove()
            raise

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Raises RuntimeError with what a method raised."""
        reply = self._leftovers.directory / "answer-{}.json"
        order = {"extension": self._extension, "method": method, "arguments": arguments, "reply": str(reply)}
        empty = [(json.dumps(order), torch.empty(0))]
        self._aside(self._sglang.begin_weight_update)
        success, message = self._aside(
            lambda: self._sglang.update_weights_from_tensor(empty, load_format=LOADER, flush_cache=False)
        )[:2]
        self._aside(self._sglang.end_weight_update)
        if not success:
            raise RuntimeError(f"it refuses to be asked: {message}")
        answer = json.loads(Path(str(reply).format(0)).read_text("utf-8"))
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return [answer["answer"]]

    def compare_with_disk(self, directory: Path) -> dict[str, str]:
        ((_, differences),) = self.call("compare_with_disk", str(directory))
        return dict(differences)

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
        options = [
            {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "repetition_penalty": sampling.repetition_penalty,
                "max_new_tokens": len(tokens) - prompt or new_tokens,
                "ignore_eos": True,
            }
            for tokens, prompt in zip(sequences, prompts, strict=True)
        ]
        prompt_ids = [list(tokens[:prompt]) for tokens, prompt in zip(sequences, prompts, strict=True)]
        names_of = [request_id(number) for number in range(len(sequences))]
        answers: Any = self._aside(
            lambda: self._sglang.generate(input_ids=prompt_ids, rid=names_of, sampling_params=options)
        )
        path = str(self._leftovers.directory / "rank-{}.pt")
        self.call("end_recording", path)
        whole = [
            [*tokens[:prompt], *answer["output_ids"]]
            for tokens, prompt, answer in zip(sequences, prompts, answers, strict=True)
        ]
        steps = torch.load(path.format(0), mmap=False, weights_only=True)
        return assembled([steps], Recording(tokens=whole, prompts=list(prompts)))

    def close(self) -> None:
        self._sglang.shutdown()
        self._aside.end()
        self._leftovers.remove()
