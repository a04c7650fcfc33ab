"""The `async_training` section."""

from __future__ import annotations

from dataclasses import dataclass

from verl.utils.config import option


@dataclass(frozen=True, kw_only=True)
class AsyncTrainingConfig:
    """How far generation and training may run apart; only `verl.experimental.fully_async_policy` looks at it."""

    staleness_threshold: float = option(
        0.1,
        "prompts that may be generated ahead of the next sync, as a share of those that are trained until then",
        least=0,
    )
    trigger_parameter_sync_step: int = option(4, "trainer steps from one sync to the next", least=1)
    require_batches: int = option(1, "mini-batches (of ppo_mini_batch_size prompts) per trainer step", least=1)
    partial_rollout: bool = option(
        True, "a sync interrupts responses, which go on with the new weights; false: it waits until they are complete"
    )
    total_rollout_steps: int | None = option(
        None, "prompts of the whole run; null: as many as trainer.total_training_steps take", least=1
    )
    concurrent_samples_per_replica: int = option(16, "prompts in flight per rollout replica", least=1)

    def max_outstanding(self, required: int) -> int:
        """Prompts that may be started per synced version, when a trainer step takes `required` of them."""
        return int(required * (1 + self.staleness_threshold) * self.trigger_parameter_sync_step)
