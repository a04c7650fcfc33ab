"""A loop, an estimator, a loss and a reward manager that know verl's names alone."""

from uuid import uuid4

import torch

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss
from verl.workers.reward_manager import register


@register_adv_est("centred")
def centred(token_level_rewards, response_mask, index=None, config=None, **kwargs):
    scores = token_level_rewards.sum(-1)
    advantages = (scores - scores.mean()).unsqueeze(-1) * response_mask * config.get("gamma")
    return advantages, advantages


@register_policy_loss("plain")
def plain(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    losses = -advantages * (log_prob - old_log_prob).exp()
    return agg_loss(losses, response_mask, loss_agg_mode, **config.get("global_batch_info", {})), {"actor/mine": 2.0}


@register("lengths")
class Lengths:
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", **kwargs):
        self.tokenizer = tokenizer

    def __call__(self, data, return_dict=False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for i in range(len(data)):
            item = data[i]
            length = int(item.batch["response_mask"].sum())
            rewards[i, max(length - 1, 0)] = item.non_tensor_batch["__extra_fields__"]["first"]
        return {"reward_tensor": rewards, "reward_extra_info": {"length": [1.0] * len(data)}}


class Once(AgentLoopBase):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.response_length = self.rollout_config.response_length or self.data_config.max_response_length

    async def run(self, sampling_params, **kwargs):
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        output = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=dict(sampling_params)
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids[: self.response_length],
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            num_turns=2,
            metrics=AgentLoopMetrics(generate_sequences=0.1),
            extra_fields={"first": output.token_ids[0]},
        )
