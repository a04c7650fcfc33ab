"""The worker of a trainer rank that holds a part of the critic beside its part of the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from verl.protocol import DataProto, tensors_of
from verl.single_controller import Dispatch, register
from verl.utils.device import local_device
from verl.workers.config import ActorRolloutRefConfig, CriticConfig
from verl.workers.engine.base import ValueEngine
from verl.workers.engine.fsdp.value import FSDP2ValueEngine
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.engine.snapshots import Places, Rememberable, Reshardable, State, placed_under, under
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.losses import LossTotals, compute_value_loss
from verl.workers.mini_batches import iterate_mini_batches, mini_batch_size_per_rank, num_mini_batches, shuffler


class CriticLoss:
    """The value loss as a `verl.workers.engine.base.LossFunction`, whose "log-probs" are values.

    Reads `values` (those before the update), `returns` and `response_mask`.
    """

    def __init__(self, config: CriticConfig) -> None:
        self._config = config

    def __call__(
        self, log_prob: torch.Tensor, entropy: torch.Tensor | None, micro_batch: DataProto, totals: LossTotals
    ) -> tuple[torch.Tensor, dict[str, float | torch.Tensor]]:
        batch = tensors_of(micro_batch)
        loss, metrics = compute_value_loss(
            log_prob,
            batch["returns"],
            batch["values"],
            batch["response_mask"],
            cliprange_value=self._config.cliprange_value,
            loss_agg_mode=self._config.loss_agg_mode,
            totals=replace(totals, loss_scale_factor=self._config.loss_scale_factor),
        )
        return loss, {**metrics, "critic/vf_loss": loss.detach()}


class ActorCriticWorker(ActorRolloutRefWorker):
    """As `ActorRolloutRefWorker`; the methods that name the critic are collectives of the same group."""

    def __init__(self, config: ActorRolloutRefConfig, role: str, *, critic: CriticConfig, **options: Any) -> None:
        """`critic.model.path` is a Hugging Face directory, or None for the policy's."""
        super().__init__(config, role, **options)
        self.critic_config = critic
        self._critic_mini_batch_size = mini_batch_size_per_rank(
            critic.ppo_mini_batch_size or config.actor.ppo_mini_batch_size, config.rollout.n, self.world_size
        )
        self._critic_loss = CriticLoss(critic)
        self._critic: ValueEngine | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_critic(self) -> None:
        """After `init_model`: build the critic's engine in the same process group."""
        critic = self.critic_config
        options: dict[str, Any] = {
            "model_config": critic.hf_model(self.config.model.path),
            "optim_config": critic.optim,
            "grad_clip": critic.grad_clip,
            "device": local_device(self.device_name, self.local_rank),
            "seed": self._seed,
            "before_step": self.before_step,
        }
        if critic.strategy == "megatron":
            from verl.workers.engine.megatron.value import MegatronValueEngine  # its package is optional

            self._critic = MegatronValueEngine(megatron_config=self.config.actor.megatron, **options)
        else:
            self._critic = FSDP2ValueEngine(fsdp_config=critic.fsdp, **options)
        self._critic.build()
        self.watch_own_time(self._critic)
        self._limit_collectives()

    @property
    def critic(self) -> ValueEngine:
        if self._critic is None:
            raise RuntimeError("init_critic has not been called")
        return self._critic

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    @record_function("compute_values")
    def compute_values(self, data: DataProto) -> DataProto:
        """`values`, float32 [B, R]: the expected return before each token of the response."""
        with self.own_time.during("values"):
            values = self.critic.compute_values(data, limits=self._critic_limits())
        return DataProto.from_dict(tensors={"values": values})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    @record_function("update_critic")
    def update_critic(self, data: DataProto) -> dict[str, float]:
        """One training step on the whole batch, as `update_actor` makes one. Metrics are equal on all ranks."""
        num = num_mini_batches(len(data), self.critic_config, self._critic_mini_batch_size)
        mini_batches = iterate_mini_batches(
            data,
            self.critic_config,
            size=self._critic_mini_batch_size,
            generator=shuffler(self.critic_config.data_loader_seed, self.rank, data),
        )
        with self.own_time.during("update_critic"):
            steps = [
                self.critic.train_mini_batch(each, self._critic_loss, temperature=1.0, limits=self._critic_limits())
                for each in self.counted(mini_batches, num)
            ]
        metrics = {
            name if "/" in name else f"critic/{name}": sum(step[name] for step in steps) / len(steps)
            for name in steps[0]
        }
        metrics["critic/skipped_steps"] = sum(step["skipped_steps"] for step in steps)
        metrics["critic/lr"] = self.critic.step_lr()
        return metrics

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_critic_checkpoint(self, path: str) -> None:
        """Write `critic.checkpoint.save_contents` to the directory `path`, as `save_checkpoint` does."""
        self.save(self.critic, Path(path), self.critic_config.checkpoint)

    @property
    def checkpoints_saved_async(self) -> bool:
        return super().checkpoints_saved_async or self.critic_config.checkpoint.async_save

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_critic_checkpoint(self, path: str) -> None:
        """Load `critic.checkpoint.load_contents` from `path`, with any number of ranks."""
        self.before_step()
        self.critic.load_checkpoint(Path(path), self.critic_config.checkpoint.load_contents)

    def snapshot(self) -> dict[str, torch.Tensor]:
        critic = {f"critic.{name}": value for name, value in self._rememberable_critic.snapshot().items()}
        return super().snapshot() | critic

    def restore(self, saved: State) -> None:
        self._rememberable_critic.restore(under("critic.", saved))
        super().restore(saved)

    def places(self) -> Places | None:
        policy = super().places()
        if policy is None or not isinstance(self._critic, Reshardable):
            return None
        return {**policy, **placed_under("critic.", self._critic.places())}

    @property
    def _rememberable_critic(self) -> Rememberable:
        assert isinstance(self._critic, Rememberable)  # the project's own all are
        return self._critic

    def _critic_limits(self) -> MicroBatchLimits:
        critic = self.critic_config
        return MicroBatchLimits.choose(
            dynamic=critic.use_dynamic_bsz,
            max_tokens=critic.ppo_max_token_len_per_gpu,
            max_sequences=critic.ppo_micro_batch_size_per_gpu,
        )
