"""Scores each response with the reward function."""

from __future__ import annotations

import math
import numbers
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from verl.protocol import DataProto
from verl.utils.config import ConfigError
from verl.utils.reward_score import RewardFunction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_CHARACTERS = 120


class RewardError(RuntimeError):
    """The reward function failed on a sample, or returned no finite number. The message names the sample."""


@dataclass(frozen=True, kw_only=True)
class RewardOutput:
    """Rewards of B responses."""

    reward_tensor: torch.Tensor
    """float32 [B, R]: the score on the last valid token of the response, 0 elsewhere."""
    responses: list[str]
    """The scored texts, without special tokens."""
    extra_info: dict[str, list[Any]]
    """Whatever else the reward function returned: per name one value per response, None where it returned none."""


@dataclass(frozen=True, kw_only=True)
class _Sample:
    position: int
    index: Any
    """The data set's own number of the prompt."""
    uid: Any
    data_source: str
    response: str
    ground_truth: Any
    extra_info: dict[str, Any]

    def __str__(self) -> str:
        shown = self.response[:SHOWN_CHARACTERS] + ("..." if len(self.response) > SHOWN_CHARACTERS else "")
        names = "".join(
            f"{key} {value}, " for key, value in (("index", self.index), ("uid", self.uid)) if value is not None
        )
        return f"sample {self.position} ({names}data_source {self.data_source}, response {shown!r})"


class NaiveRewardManager:
    """Runs on the driver, in `num_workers` threads. `reward_fn_key` names the column that holds the data source."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        compute_score: RewardFunction,
        num_workers: int = 1,
        *,
        reward_fn_key: str = "data_source",
    ) -> None:
        self._tokenizer = tokenizer
        self._compute_score = compute_score
        self._num_workers = num_workers
        self._reward_fn_key = reward_fn_key

    def __call__(self, data: DataProto) -> RewardOutput:
        """Score every response of `data`, which has `responses`, `attention_mask` and the columns of the data set.

        An empty response (no valid token) is scored, too; no token can carry its score, so its row stays 0. Raises
        RewardError, chained to what the reward function raised, for the first sample that fails; ConfigError for a data
        source without a rule.
        """
        if data.batch is None:
            raise ValueError("there are no responses to score: the batch has no tensors")
        responses = data.batch["responses"]
        batch_size, width = responses.shape
        lengths = data.batch["attention_mask"][:, -width:].sum(-1)
        texts = self._tokenizer.batch_decode(
            [row[:length].tolist() for row, length in zip(responses, lengths.tolist(), strict=True)],
            skip_special_tokens=True,
        )
        scores, extra_info = _columns(self._score_all(self._samples(data, texts)))
        reward_tensor = torch.zeros(batch_size, width, dtype=torch.float32)
        rows = torch.nonzero(lengths > 0).flatten()
        reward_tensor[rows, lengths[rows] - 1] = torch.tensor(scores, dtype=torch.float32)[rows]
        return RewardOutput(reward_tensor=reward_tensor, responses=texts, extra_info=extra_info)

    def _samples(self, data: DataProto, texts: list[str]) -> list[_Sample]:
        columns = data.non_tensor_batch
        empty = [None] * len(data)
        return [
            _Sample(
                position=position,
                index=index,
                uid=uid,
                data_source=data_source,
                response=text,
                ground_truth=(reward_model or {}).get("ground_truth"),
                extra_info=extra_info or {},
            )
            for position, (index, uid, data_source, text, reward_model, extra_info) in enumerate(
                zip(
                    columns.get("index", empty),
                    columns.get("uid", empty),
                    columns[self._reward_fn_key],
                    texts,
                    columns["reward_model"],
                    columns.get("extra_info", empty),
                    strict=True,
                )
            )
        ]

    def _score_all(self, samples: list[_Sample]) -> list[dict[str, Any]]:
        if self._num_workers == 1:
            return [self._score(sample) for sample in samples]
        with ThreadPoolExecutor(self._num_workers, thread_name_prefix="reward") as pool:
            return list(pool.map(self._score, samples))

    def _score(self, sample: _Sample) -> dict[str, Any]:
        try:
            result = self._compute_score(
                data_source=sample.data_source,
                solution_str=sample.response,
                ground_truth=sample.ground_truth,
                extra_info=sample.extra_info,
            )
        except ConfigError:
            raise
        except Exception as exc:
            raise RewardError(f"the reward function raised {type(exc).__name__}: {exc} on {sample}") from exc
        named = result if isinstance(result, dict) else {"score": result}
        score = named.get("score")
        if isinstance(score, torch.Tensor) and score.numel() == 1:
            score = score.item()
        if not isinstance(score, numbers.Real) or not math.isfinite(score):
            raise RewardError(
                f"the reward function returned {str(result)[:SHOWN_CHARACTERS]} instead of a finite number, or a dict "
                f"with one under 'score', on {sample}"
            )
        return {**named, "score": float(score)}


def _columns(results: list[dict[str, Any]]) -> tuple[list[float], dict[str, list[Any]]]:
    names = dict.fromkeys(name for result in results for name in result if name != "score")
    return [result["score"] for result in results], {name: [result.get(name) for result in results] for name in names}
