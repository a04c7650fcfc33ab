"""Generation with a saved version of an adapter.

`Sampler` is all that the service asks for, so that an engine of its own can take the place of `InProcessSampler`.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class Sampler(Protocol):
    """Called from one thread."""

    def sample(self, version: Version | None, asked: Asked) -> bytes:
        """A SampleResponse of exactly this version, or of the base model. Log-probs are the model's own: before
        temperature, top-k and top-p. Raises Refused if the version's files have changed."""


class InProcessSampler:
    """Generates with transformers, on the base that is trained, between calls of its tenants."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._loaded: OrderedDict[str, tuple[str, Shape]] = OrderedDict()

    def sample(self, version: Version | None, asked: Asked) -> bytes:
        name = None if version is None else self._adapter(version)
        prompt, likeliest = None, None
        with torch.no_grad(), self._base.using(name) as model:
            if asked.prompt_logprobs or asked.likeliest_of_prompt:
                prompt, likeliest = self._score(model, asked)
            samples = self._generate(model, asked)
        return written_samples(samples, prompt if asked.prompt_logprobs else None, likeliest)

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
                if self._ends(self._tokens[row]):
                    self._ended.add(row)
        return torch.tensor([row in self._ended for row in range(len(input_ids))])

    def _ends(self, tokens: list[int]) -> bool:
        if tokens[-1] in self._asked.stop_tokens:
            return True
        text = self._tokenizer.decode(tokens) if self._asked.stop_strings else ""
        return any(string in text for string in self._asked.stop_strings)

    def samples(self) -> list[Sampled]:
        return [
            Sampled(
                tokens=np.array(tokens, dtype=np.int32),
                logprobs=np.array(self._logprobs[row], dtype=np.float32),
                stopped=row in self._ended,
                likeliest=_joined(self._likeliest[row]) if self._asked.likeliest_of_samples else None,
            )
            for row, tokens in enumerate(self._tokens)
        ]


def _joined(parts: Sequence[Likeliest]) -> Likeliest:
    tokens, logprobs = [each.tokens for each in parts], [each.logprobs for each in parts]
    return Likeliest(tokens=np.concatenate(tokens), logprobs=np.concatenate(logprobs))


def _likeliest(scores: torch.Tensor, k: int) -> Likeliest:
    found = scores.topk(min(k, scores.shape[-1]), dim=-1)
    return Likeliest(tokens=found.indices.numpy().astype(np.int32), logprobs=found.values.numpy())
