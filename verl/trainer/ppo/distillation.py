"""The teachers' log-probs as tensors of a batch, and the student's distance from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from verl.protocol import DataProto, tensors_of
from verl.trainer.fleet.teachers import Asked, padded_scores, teachers_of
from verl.trainer.ppo import core_algos
from verl.utils.config import ConfigError
from verl.utils.model import load_hf_config, require_vocabulary
from verl.utils.torch_functional import masked_mean
from verl.workers.config import PPOConfig
from verl.workers.distilled_loss import PREFIX, TEACHER_CANDIDATE_LOG_PROBS, TEACHER_LOG_PROBS
from verl.workers.engine.base import CANDIDATES
from verl.workers.losses.distillation import reverse_kl

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.utils.dataset import PromptLoader


def require_teachers(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, device: str) -> None:
    """Raises ConfigError for a teacher whose files are missing or whose vocabulary is not the policy's."""
    for teacher in teachers_of(config, device):
        key = f"distillation.teacher_models.{teacher.name}.model_path"
        require_vocabulary(tokenizer, teacher.path, key, trust_remote_code=teacher.config.trust_remote_code)


def require_routes(config: PPOConfig, train: PromptLoader) -> None:
    """Raises ConfigError for training samples whose source has no teacher, if the data set counts its `sources`."""
    teachers, data = config.distillation.teachers, config.data
    if len(teachers) < 2 or config.distillation.teacher_key != data.reward_fn_key:
        return
    keys = {str(teacher.key) for teacher in teachers.values()}
    if missing := sorted(set(getattr(train.dataset, "sources", ())) - keys):
        raise ConfigError(
            f"distillation.teacher_models: no teacher has the key {missing[0]}, which is the "
            f"{config.distillation.teacher_key} of training samples ({', '.join(sorted(keys))})"
        )


def add_teacher_log_probs(batch: DataProto, asked: Asked, config: PPOConfig) -> dict[str, float]:
    """Wait for the teachers' log-probs and add them to `batch`. Returns metrics of the policy before the update.

    `batch` must have `old_log_probs`, and its rows in the order of the request `asked`. Raises RolloutError.
    """
    tensors, loss = tensors_of(batch), config.distillation.distillation_loss
    vocabulary = load_hf_config(config.actor_rollout_ref.model).get_text_config().vocab_size
    scores = asked.wait()
    said = [torch.from_numpy(each) for each in padded_scores(scores, tensors["responses"].shape, vocabulary)]
    tensors[TEACHER_LOG_PROBS] = said[0]
    if loss.uses_topk:
        tensors[CANDIDATES], tensors[TEACHER_CANDIDATE_LOG_PROBS] = said[1], said[2]
    old, mask = tensors["old_log_probs"], tensors["response_mask"]
    actor = config.actor_rollout_ref.actor
    kl = core_algos.agg_loss(old - said[0], mask, actor.loss_agg_mode, loss_scale_factor=actor.loss_scale_factor)
    metrics = {
        f"{PREFIX}kl": kl.item(),
        f"{PREFIX}teacher_log_prob": masked_mean(said[0], mask).item(),
    }
    if not loss.uses_topk and mask.any():
        losses = reverse_kl(old, said[0], loss)[mask.bool()]
        metrics |= {f"{PREFIX}loss_min": losses.min().item(), f"{PREFIX}loss_max": losses.max().item()}
    return metrics
