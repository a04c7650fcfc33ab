"""Generation with a saved version of an adapter.

`Sampler` is all that the service asks for. `InProcessSampler` is one on the base that is trained; `engine_sampler` has
the one with an engine of its own.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from verl.tenants.base import Base, Shape
from verl.tenants.checkpoints import Version
from verl.tenants.wire import Likeliest, Sampled, written_samples
from verl.tenants.worker import Worker

LOADED = 4
"""Versions that are kept as adapters of the model."""
NOTHING = -99999.0
"""The protocol's log-prob of an empty place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request to sample. Its values are checked."""

    prompt: np.ndarray
    number: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    prompt_logprobs: bool = False
    prompt_logprobs_last: int | None = None
    """Of the prompt's last tokens alone."""
    likeliest_of_prompt: int = 0
    likeliest_of_samples: int = 0

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_logprobs or bool(self.likeliest_of_prompt)

    def ended_by(self, tokens: list[int], decode: Callable[[list[int]], str]) -> bool:
        """Whether the last of the sampled `tokens` ends a sample: a stop token, or what completes a stop string."""
        if tokens[-1] in self.stop_tokens:
            return True
        text = decode(tokens) if self.stop_strings else ""
        return any(string in text for string in self.stop_strings)


Scored: TypeAlias = "tuple[np.ndarray | None, Likeliest | None]"
"""Log-probs of a prompt's tokens [n], where they are asked for, and the likeliest ones. The first token has none."""


class Sampler(Protocol):
    """Its methods are called on the service's event loop."""

    def require(self, shape: Shape) -> None:
        """Raises Refused, with the layers, for adapters of a shape that it cannot sample with."""

    def prepare(self, version: Version) -> None:
        """Samples of it may be asked for soon."""

    async def sample(self, version: Version | None, asked: Asked) -> bytes:
        """A SampleResponse of exactly this version, or of the base model. Log-probs are the model's own: before
        temperature, top-k and top-p. Raises Refused if the version's files have changed."""

    def close(self) -> None:
        """End what it has started. Requests that wait then are not answered."""


class InProcessSampler:
    """Generates with transformers, on the base that is trained and its thread, between calls of its tenants."""

    def __init__(self, base: Base, worker: Worker) -> None:
        self._base, self._worker = base, worker
        self._loaded: OrderedDict[str, tuple[str, Shape]] = OrderedDict()

    def require(self, shape: Shape) -> None:
        """Every adapter that is trained here is sampled here."""

    def prepare(self, version: Version) -> None:
        """The thread has other work until samples are asked for."""

    async def sample(self, version: Version | None, asked: Asked) -> bytes:
        return await self._worker.compute(lambda: self._sampled(version, asked))

    async def score(self, version: Version | None, asked: Asked) -> Scored:
        """What is asked of the prompt."""
        return await self._worker.compute(lambda: self._scored(version, asked))

    def close(self) -> None:
        """The thread is the worker's."""

    def _sampled(self, version: Version | None, asked: Asked) -> bytes:
        scored = self._scored(version, asked)
        with torch.no_grad(), self._using(version) as model:
            return written_samples(self._generate(model, asked), *scored)

    def _scored(self, version: Version | None, asked: Asked) -> Scored:
        if not asked.scores_prompt:
            return None, None
        with torch.no_grad(), self._using(version) as model:
            prompt, likeliest = self._score(model, asked)
        return (prompt if asked.prompt_logprobs else None), likeliest

    def _using(self, version: Version | None) -> AbstractContextManager[Any]:
        return self._base.using(None if version is None else self._adapter(version))

    def _adapter(self, version: Version) -> str:
        """The model's adapter with this version: of those that are kept, or in the place of the longest unused one."""
        if version.digest in self._loaded:
            self._loaded.move_to_end(version.digest)
            return self._loaded[version.digest][0]
        tensors = version.tensors()
        name = None
        if len(self._loaded) == LOADED:
            name, shape = self._loaded.popitem(last=False)[1]
            if shape != version.shape:
                self._base.remove(name)
                name = None
        name = name or self._base.add(version.shape, seed=0)
        self._base.fill(name, tensors)
        self._loaded[version.digest] = name, version.shape
        return name

    def _score(self, model: Any, asked: Asked) -> tuple[np.ndarray, Likeliest | None]:
        """Of the prompt's tokens [n]: the first one has none."""
        logits = model(input_ids=torch.from_numpy(asked.prompt)[None], use_cache=False).logits[0, :-1].float()
        scores = logits.log_softmax(-1)
        of_prompt = scores.gather(1, torch.from_numpy(asked.prompt)[1:, None])[:, 0].numpy()
        skipped = 1 if asked.prompt_logprobs_last is None else len(asked.prompt) - asked.prompt_logprobs_last
        found = np.concatenate([[np.nan], of_prompt]).astype(np.float32)
        found[:skipped] = np.nan
        if not asked.likeliest_of_prompt:
            return found, None
        likeliest = _likeliest(scores, asked.likeliest_of_prompt)
        tokens = np.concatenate([np.zeros_like(likeliest.tokens[:1]), likeliest.tokens])
        logprobs = np.concatenate([np.full_like(likeliest.logprobs[:1], NOTHING), likeliest.logprobs])
        tokens[:skipped], logprobs[:skipped] = 0, NOTHING
        return found, Likeliest(tokens=tokens, logprobs=logprobs)

    def _generate(self, model: Any, asked: Asked) -> list[Sampled]:
        scores = _Scores()
        rows = _Rows(self._base.tokenizer, asked, scores)
        sampling: dict[str, Any] = {"do_sample": False}
        if asked.temperature > 0:
            sampling = {
                "do_sample": True,
                "temperature": asked.temperature,
                "top_k": max(asked.top_k, 0),
                "top_p": asked.top_p,
                "num_return_sequences": asked.number,
            }
        kind: Any = GenerationConfig
        config = kind(max_new_tokens=asked.max_tokens, pad_token_id=0, **sampling)
        prompt = torch.from_numpy(asked.prompt)[None]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(secrets.randbits(63) if asked.seed is None else asked.seed)
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                logits_processor=LogitsProcessorList([scores]),
                stopping_criteria=StoppingCriteriaList([rows]),
            )
        samples = rows.samples()
        return samples if asked.temperature > 0 else samples * asked.number


class _Scores(LogitsProcessor):
    """The log-probs of the next token [rows, vocabulary], before temperature, top-k and top-p."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        self.now = scores.float().log_softmax(-1)
        return scores


class _Rows(StoppingCriteria):
    """Notes each row's tokens and log-probs. A row ends with a stop token, or the one that completes a string."""

    def __init__(self, tokenizer: Any, asked: Asked, scores: _Scores) -> None:
        self._tokenizer, self._asked, self._scores = tokenizer, asked, scores
        number = asked.number if asked.temperature > 0 else 1
        self._tokens: list[list[int]] = [[] for _ in range(number)]
        self._logprobs: list[list[float]] = [[] for _ in range(number)]
        self._likeliest: list[list[Likeliest]] = [[] for _ in range(number)]
        self._ended: set[int] = set()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        for row, (token, logprobs) in enumerate(zip(input_ids[:, -1].tolist(), self._scores.now, strict=True)):
            if row not in self._ended:
                self._tokens[row].append(token)
                self._logprobs[row].append(logprobs[token].item())
                if self._asked.likeliest_of_samples:
                    self._likeliest[row].append(_likeliest(logprobs[None], self._asked.likeliest_of_samples))
                if self._asked.ended_by(self._tokens[row], self._tokenizer.decode):
                    self._ended.add(row)
        return torch.tensor([row in self._ended for row in range(len(input_ids))])

    def samples(self) -> list[Sampled]:
        return [
            Sampled(
                tokens=np.array(tokens, dtype=np.int32),
                logprobs=np.array(self._logprobs[row], dtype=np.float32),
                stopped=row in self._ended,
                likeliest=joined(self._likeliest[row]) if self._asked.likeliest_of_samples else None,
            )
            for row, tokens in enumerate(self._tokens)
        ]


def joined(parts: Sequence[Likeliest]) -> Likeliest:
    tokens, logprobs = [each.tokens for each in parts], [each.logprobs for each in parts]
    return Likeliest(tokens=np.concatenate(tokens), logprobs=np.concatenate(logprobs))


def _likeliest(scores: torch.Tensor, k: int) -> Likeliest:
    found = scores.topk(min(k, scores.shape[-1]), dim=-1)
    return Likeliest(tokens=found.indices.numpy().astype(np.int32), logprobs=found.values.numpy())
