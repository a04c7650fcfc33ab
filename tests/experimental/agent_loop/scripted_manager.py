"""A policy whose messages a test writes down, where the agent loop itself is under test."""

from tests.experimental.agent_loop.scripted_server import said
from verl.workers.rollout.records import SamplingOptions


class ScriptedManager:
    """Stands in for ServerManager: says the texts of its script, one per call, ended by the end-of-message token.

    `end`: by another token than the tokenizer's.
    """

    def __init__(self, tokenizer, *texts, end=None, log_probs=True):
        self.end_id = tokenizer.convert_tokens_to_ids(end or tokenizer.eos_token)
        self.log_prob = -0.5 if log_probs else None
        self.tokenizer, self.texts, self.prompts = tokenizer, list(texts), []
        self.budgets, self.stops, self.request_ids, self.pictures = [], [], set(), []

    async def generate(self, request_id, *, prompt_ids, sampling_params, image_data=()):
        sampling = SamplingOptions.of(sampling_params)
        self.prompts.append(list(prompt_ids))
        self.pictures.append(list(image_data))
        self.budgets.append(sampling.max_tokens)
        self.stops.append(sampling.stop_token_ids)
        self.request_ids.add(request_id)
        text = self.texts.pop(0)
        ended = not text.endswith("…")
        token_ids = self.tokenizer.encode(text.removesuffix("…"), add_special_tokens=False)
        token_ids += [self.end_id] if ended else []
        reason = "completed" if ended else "length"
        return said(token_ids[: sampling.max_tokens], reason, version=len(self.prompts), log_prob=self.log_prob)
