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
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from verl.tenants.base import Base
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
        self._loaded: OrderedDict[str, str] = OrderedDict()

    def sample(self, version: Version | None, asked: Asked) -> bytes:
        name = None if version is None else self._adapter(version)
        prompt, likeliest = None, None
        with torch.no_grad(), self._base.using(name) as model:
            if asked.prompt_logprobs or asked.likeliest_of_prompt:
                prompt, likeliest = self._score(model, asked)
            samples = self._generate(model, asked)
        return written_samples(samples, prompt if asked.prompt_logprobs else None, likeliest)

    def _adapter(self, version: Version) -> str:
        if version.digest in self._loaded:
            self._loaded.move_to_end(version.digest)
            return self._loaded[version.digest]
        tensors = version.tensors()
        name = self._base.add(version.shape, seed=0)
        self._base.fill(name, tensors)
        self._loaded[version.digest] = name
        if len(self._loaded) > LOADED:
            self._base.remove(self._loaded.popitem(last=False)[1])
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
        ends = _Ends(self._base.tokenizer, asked)
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
        config = kind(
            max_new_tokens=asked.max_tokens,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **sampling,
        )
        prompt = torch.from_numpy(asked.prompt)[None]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(secrets.randbits(63) if asked.seed is None else asked.seed)
            generated = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([ends]),
            )
        rows = generated.sequences[:, len(asked.prompt) :]
        scores = torch.stack(generated.logits, 1).float().log_softmax(-1)
        samples = []
        for row in range(len(rows)):
            length = ends.after.get(row, rows.shape[1])
            tokens, score = rows[row, :length], scores[row, :length]
            samples.append(
                Sampled(
                    tokens=tokens.numpy().astype(np.int32),
                    logprobs=score.gather(1, tokens[:, None])[:, 0].numpy(),
                    stopped=row in ends.after,
                    likeliest=_likeliest(score, asked.likeliest_of_samples) if asked.likeliest_of_samples else None,
                )
            )
        return samples if asked.temperature > 0 else samples * asked.number


class _Ends(StoppingCriteria):
    """Ends a row with the token that is a stop token, or completes a stop string in what was generated."""

    def __init__(self, tokenizer: Any, asked: Asked) -> None:
        self._tokenizer = tokenizer
        self._asked = asked
        self.after: dict[int, int] = {}
        """The length of each row that has ended."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        generated = input_ids[:, len(self._asked.prompt) :]
        for row, tokens in enumerate(generated.tolist()):
            if row not in self.after and self._ends(tokens):
                self.after[row] = len(tokens)
        return torch.tensor([row in self.after for row in range(len(generated))])

    def _ends(self, tokens: list[int]) -> bool:
        if tokens[-1] in self._asked.stop_tokens:
            return True
        text = self._tokenizer.decode(tokens) if self._asked.stop_strings else ""
        return any(string in text for string in self._asked.stop_strings)


def _likeliest(scores: torch.Tensor, k: int) -> Likeliest:
    found = scores.topk(min(k, scores.shape[-1]), dim=-1)
    return Likeliest(tokens=found.indices.numpy().astype(np.int32), logprobs=found.values.numpy())
