"""The likeliest tokens, from an engine and from Hugging Face."""

from __future__ import annotations

import asyncio
import itertools

import torch
from transformers import PreTrainedModel

from verl.workers.rollout import RolloutReplica, SamplingOptions

PROMPTS = [[10 * first + column for column in range(3, 4 + first % 5)] for first in range(7)] + [list(range(3, 203))]
"""The last fills a block of vLLM's prefix cache (128 tokens on CPU), which must not outlive the version."""
NUM_TOKENS = 16

_numbers = itertools.count()


async def greedy_tokens(replica: RolloutReplica, version: int) -> list[list[int]]:
    """What the engine says to PROMPTS; all of it must come from `version`."""
    sampling = SamplingOptions(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    calls = [replica.server_handle.generate.remote(prompt, sampling, f"greedy-{next(_numbers)}") for prompt in PROMPTS]
    outputs = await asyncio.gather(*calls)
    assert {span.version for output in outputs for span in output.weight_versions} == {version}
    return [output.token_ids for output in outputs]


@torch.inference_mode()
def hugging_face_tokens(model: PreTrainedModel) -> list[list[int]]:
    model.generation_config.eos_token_id = None  # go on after it, as the engines are told to
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0
        )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers
