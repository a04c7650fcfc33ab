"""Pads trajectories of different lengths to the tensors of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl.experimental.agent_loop.output import AgentLoopOutput
from verl.protocol import DataProto
from verl.workers.engine.base import ROUTES, UNKNOWN_EXPERT
from verl.workers.rollout.records import NO_VERSION


def to_batch(
    outputs: Sequence[AgentLoopOutput],
    *,
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
    kv_versions: bool = False,
) -> DataProto:
    """`outputs` (B of them) as a batch with P = `prompt_length` and R = `response_length`.

    int64: `prompts` [B, P] padded on the left, `responses`, `response_mask`, `rollout_versions` [B, R] padded on the
    right, with `kv_versions` also `rollout_kv_versions`; `input_ids`, `attention_mask`, `position_ids` [B, P+R];
    float32: `rollout_log_probs` [B, R], if any; int16: `routed_experts` [B, P+R, layers, experts per token], if any.
    Objects: `__num_turns__`, `__stop_reason__`, `__replicas__`, `__extra_fields__`, and `__reward_score__`, or None.

    Raises ValueError for a trajectory that is too long, and if only some have log-probs.
    """
    for row, output in enumerate(outputs):
        for name, tokens, limit in (
            ("prompt", output.prompt_ids, prompt_length),
            ("response", output.response_ids, response_length),
        ):
            if len(tokens) > limit:
                raise ValueError(f"sample {row}: a {name} of {len(tokens)} tokens where at most {limit} fit")
    without = [row for row, output in enumerate(outputs) if output.response_logprobs is None]
    if without and len(without) < len(outputs):
        raise ValueError(f"only some samples have log-probs; without: {without[:16]}")

    prompts = _rows([output.prompt_ids for output in outputs], prompt_length, pad_token_id, left=True)
    responses = _rows([output.response_ids for output in outputs], response_length, pad_token_id)
    # By length, not by comparison with the padding token: that one may also be generated.
    prompt_mask = _rows([[1] * len(output.prompt_ids) for output in outputs], prompt_length, 0, left=True)
    token_mask = _rows([[1] * len(output.response_ids) for output in outputs], response_length, 0)
    attention_mask = torch.cat([prompt_mask, token_mask], dim=1)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": _rows([output.response_mask for output in outputs], response_length, 0),
        "rollout_versions": _rows([output.response_versions or [] for output in outputs], response_length, NO_VERSION),
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
    }
    if kv_versions:
        oldest = [output.response_kv_versions or [] for output in outputs]
        tensors["rollout_kv_versions"] = _rows(oldest, response_length, NO_VERSION)
    if any(output.routed_experts is not None for output in outputs):
        tensors[ROUTES] = _routes(outputs, prompt_length, response_length)
    if outputs and not without:
        log_probs = [output.response_logprobs or [] for output in outputs]
        tensors["rollout_log_probs"] = _rows(log_probs, response_length, 0.0, dtype=torch.float32)
    return DataProto.from_dict(
        tensors,
        {
            "__num_turns__": [output.num_turns for output in outputs],
            "__stop_reason__": [output.stop_reason for output in outputs],
            "__replicas__": [list(output.replicas) for output in outputs],
            "__reward_score__": [output.reward_score for output in outputs],
            "__extra_fields__": [dict(output.extra_fields) for output in outputs],
        },
    )


def _routes(outputs: Sequence[AgentLoopOutput], prompt_length: int, response_length: int) -> torch.Tensor:
    """Of samples that have none, and of tokens that no engine has read, the trainer's routers choose."""
    (kind,) = {output.routed_experts.shape[1:] for output in outputs if output.routed_experts is not None}
    found = torch.full((len(outputs), prompt_length + response_length, *kind), UNKNOWN_EXPERT, dtype=torch.int16)
    for row, output in zip(found, outputs, strict=True):
        if output.routed_experts is not None:
            first = prompt_length - len(output.prompt_ids)
            row[first : first + len(output.routed_experts)] = torch.from_numpy(output.routed_experts.astype("int16"))
    return found


def _rows(
    rows: Sequence[Sequence[float]],
    length: int,
    padding: float,
    *,
    left: bool = False,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """A tensor [len(rows), length] with every row at the right end (`left` padding) or at the left one."""
    result = torch.full((len(rows), length), padding, dtype=dtype)
    for target, row in zip(result, rows, strict=True):
        if row:
            part = slice(length - len(row), length) if left else slice(0, len(row))
            target[part] = torch.tensor(row, dtype=dtype)
    return result
