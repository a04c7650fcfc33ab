"""Scores each response with the reward function."""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from verl.protocol import DataProto
from verl.utils.config import ConfigError
from verl.utils.plain import as_float
from verl.utils.reward_score import Abandoned, NoNumber, Raised, RewardFunction, Scored, ScoringError, ScoringPool
from verl.utils.user_code import UserCodeError
from verl.workers.reward_manager.overlong import OverlongPenalty

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_CHARACTERS = 120
TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


class RewardError(UserCodeError):
    """The reward function failed on a sample, returned no finite number, or ended its process on too many samples. The
    message names the sample."""


@dataclass(frozen=True, kw_only=True)
class RewardOutput:
    """Rewards of B responses."""

    reward_tensor: torch.Tensor
    """float32 [B, R]: the score on the last valid token of the response, 0 elsewhere."""
    responses: list[str]
    """The scored texts, without special tokens unless they were asked for."""
    extra_info: dict[str, list[Any]]
    """Further values of the reward function: name to one value per response, None if it returned none."""
    abandoned: list[int] = field(default_factory=list)
    """Responses with score 0 because scoring them took too long, or ended its process."""
    first_failure: str = ""
    """The first of them, and why."""


GivenUp = Callable[[str], None]
"""Called with a sample and the reason as soon as its scoring has failed."""


class RewardManager(Protocol):
    """The interface of reward managers, which score batches inside a `with` block."""

    def __call__(self, data: DataProto, given_up: GivenUp | None = None) -> RewardOutput:
        """Score a batch. An error that `given_up` raises ends the scoring."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


@dataclass
class Failures:
    """Counts the samples of a step, or of a validation, that could not be scored."""

    most: float
    """The share of samples that may fail."""
    total: int = 0
    """The total number of samples, if known; 0: those scored so far."""
    scored: int = 0
    failed: int = 0
    first: str = ""

    def score(self, manager: RewardManager, batch: DataProto) -> RewardOutput:
        """Score `batch`, the next one, with `manager`.

        Raises RewardError as soon as more than the share `most` of all samples has failed.
        """
        before = self.failed
        self.scored += len(batch)
        reward = manager(batch, self._add)
        self.failed = before
        for _ in reward.abandoned:
            self._add(reward.first_failure)
        return reward

    def _add(self, failure: str) -> None:
        self.failed += 1
        self.first = self.first or failure
        total = max(self.total, self.scored)
        if self.failed > self.most * total:
            raise RewardError(
                f"the reward function failed on {self.failed} of {total} samples, more than "
                f"reward_model.max_failed={self.most:g} of them; first on {self.first}"
            )


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
    known_score: float | None = None
    """What the agent loop said; then nobody else is asked."""

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "data_source": self.data_source,
            "solution_str": self.response,
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
        }

    def __str__(self) -> str:
        shown = self.response[:SHOWN_CHARACTERS] + ("..." if len(self.response) > SHOWN_CHARACTERS else "")
        names = "".join(
            f"{key} {value}, " for key, value in (("index", self.index), ("uid", self.uid)) if value is not None
        )
        return f"sample {self.position} ({names}data_source {self.data_source}, response {shown!r})"


class NaiveRewardManager:
    """Runs on the driver; the reward function runs in `num_workers` processes, which `close` or `with` ends.

    `reward_fn_key` names the column that holds the data source. With `keep_special_tokens` the function sees all of a
    response but the token that ends it: the tokenizer's, or one of `end_token_ids`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        compute_score: RewardFunction,
        num_workers: int = 1,
        *,
        reward_fn_key: str = "data_source",
        timeout_s: float = TIMEOUT_S,
        keep_special_tokens: bool = False,
        end_token_ids: Collection[int] = (),
        penalty: OverlongPenalty | None = None,
        shows_prompts: bool = False,
        told: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`penalty` is added to the scores. `timeout_s` is the deadline of one response, by `clock`. `extra_info` has
        what is in `told`, and with `shows_prompts` the messages of the prompt as `raw_prompt`.

        Raises ConfigError for a function that no process can have.
        """
        self._tokenizer = tokenizer
        function = _pickled(compute_score)
        self._pool = ScoringPool(function, num_workers=num_workers, timeout_s=timeout_s, clock=clock)
        self._reward_fn_key = reward_fn_key
        self._keep_special_tokens = keep_special_tokens
        self._penalty = penalty
        self._shows_prompts = shows_prompts
        self._told = dict(told or {})
        self._ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, *end_token_ids}

    def __call__(self, data: DataProto, given_up: GivenUp | None = None) -> RewardOutput:
        """Score every response of `data`, which has `responses`, `attention_mask` and the columns of the data set.

        An empty response (no valid token) is scored, too; no token can carry its score, so its row stays 0. A response
        whose scoring does not end is named in a warning and gets 0; `given_up` is told of it at once, and may raise.
        Raises RewardError, chained to what the reward function raised, for a sample on which it raises; ConfigError for
        a data source without a rule.
        """
        if data.batch is None:
            raise ValueError("there are no responses to score: the batch has no tensors")
        responses = data.batch["responses"]
        batch_size, width = responses.shape
        lengths = data.batch["attention_mask"][:, -width:].sum(-1)
        texts = self._texts([row[:length].tolist() for row, length in zip(responses, lengths.tolist(), strict=True)])
        results, abandoned = self._score_all(self._samples(data, texts), given_up)
        scores, extra_info = _columns(results)
        for position in abandoned if "acc" in extra_info else ():
            extra_info["acc"][position] = 0.0
        if self._penalty is not None:
            extra_info.setdefault("acc", scores)  # as verl's: what the function says, without the penalty
            penalties = [self._penalty(length) for length in lengths.tolist()]
            scores = [score + penalty for score, penalty in zip(scores, penalties, strict=True)]
            if self._penalty.log:
                extra_info |= {"overlong_reward": penalties, "overlong": [penalty < 0 for penalty in penalties]}
        reward_tensor = torch.zeros(batch_size, width, dtype=torch.float32)
        rows = torch.nonzero(lengths > 0).flatten()
        reward_tensor[rows, lengths[rows] - 1] = torch.tensor(scores, dtype=torch.float32)[rows]
        return RewardOutput(
            reward_tensor=reward_tensor,
            responses=texts,
            extra_info=extra_info,
            abandoned=list(abandoned),
            first_failure=next(iter(abandoned.values()), ""),
        )

    def close(self) -> None:
        """End the scoring processes. Idempotent."""
        self._pool.close()

    def __enter__(self) -> Self:
        self._pool.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _texts(self, rows: list[list[int]]) -> list[str]:
        rows = [row[:-1] if row and row[-1] in self._ends else row for row in rows]
        return self._tokenizer.batch_decode(rows, skip_special_tokens=not self._keep_special_tokens)

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
                extra_info={
                    **(extra_info or {}),
                    **_of_the_loop(turns, fields),
                    **self._told,
                    **({"raw_prompt": messages} if self._shows_prompts else {}),
                },
                known_score=known_score,
            )
            for position, (
                index,
                uid,
                data_source,
                text,
                reward_model,
                extra_info,
                turns,
                fields,
                known_score,
                messages,
            ) in enumerate(
                zip(
                    columns.get("index", empty),
                    columns.get("uid", empty),
                    columns[self._reward_fn_key],
                    texts,
                    columns["reward_model"],
                    columns.get("extra_info", empty),
                    columns.get("__num_turns__", empty),
                    columns.get("__extra_fields__", empty),
                    columns.get("__reward_score__", empty),
                    columns.get("raw_prompt", empty),
                    strict=True,
                )
            )
        ]

    def _score_all(self, samples: Sequence[_Sample], given_up: GivenUp | None) -> tuple[list[Scored], dict[int, str]]:
        """A result per sample, and why, by their positions, some have none of their own."""
        unknown = [sample for sample in samples if sample.known_score is None]

        def tell(position: int, why: str) -> None:
            if given_up is not None:
                given_up(f"{unknown[position]}: {why}")

        try:
            asked = iter(self._pool.score([sample.arguments for sample in unknown], tell))
        except ScoringError as exc:
            raise RewardError(str(exc)) from exc
        results: list[Scored] = []
        abandoned: dict[int, str] = {}
        for sample in samples:
            outcome = next(asked) if sample.known_score is None else Scored(_finite(sample), {})
            if isinstance(outcome, Raised):
                cause = outcome.cause()
                if isinstance(cause, ConfigError):
                    raise cause
                raise RewardError(f"the reward function raised {outcome.message} on {sample}") from cause
            if isinstance(outcome, NoNumber):
                raise RewardError(
                    f"the reward function returned {outcome.shown} instead of a finite number, or a dict with one "
                    f"under 'score', on {sample}"
                )
            if isinstance(outcome, Abandoned):
                logger.warning("scoring %s was given up, it gets 0: %s", sample, outcome.why)
                abandoned[sample.position] = f"{sample}: {outcome.why}"
            results.append(outcome if isinstance(outcome, Scored) else Scored(0.0, {}))
        return results, abandoned


def _of_the_loop(num_turns: int | None, extra_fields: Mapping[str, Any] | None) -> dict[str, Any]:
    """What verl adds to a sample's `extra_info`; `num_turns` is None for one that no agent loop made."""
    fields = dict(extra_fields or {})
    return {"num_turns": num_turns, "rollout_reward_scores": fields.pop("reward_scores", {}), **fields}


def _finite(sample: _Sample) -> float:
    score = as_float(sample.known_score)
    if score is None or not math.isfinite(score):
        raise RewardError(f"the agent loop returned reward_score={sample.known_score!r} on {sample}")
    return score


def _pickled(function: RewardFunction) -> bytes:
    """By name if that does, else by its code, as for functions made on the way and those of a script."""
    if getattr(function, "__module__", None) != "__main__":
        with contextlib.suppress(Exception):  # pickle raises what it likes; there is another way
            return pickle.dumps(function)
    from ray import cloudpickle

    try:
        code: bytes = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
    except Exception as exc:
        raise ConfigError(
            f"the reward function {function!r} cannot be given to the processes that score: {exc}. What it holds on to "
            "must be picklable; or name its file in custom_reward_function.path, which each process loads"
        ) from exc
    return code


def _columns(results: Sequence[Scored]) -> tuple[list[float], dict[str, list[Any]]]:
    names = dict.fromkeys(name for result in results for name in result.others)
    return [result.score for result in results], {
        name: [result.others.get(name) for result in results] for name in names
    }
