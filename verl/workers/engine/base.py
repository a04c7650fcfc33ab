"""The interfaces of training engines and losses, independent of FSDP and Megatron."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from verl.checkpoint_engine.ports import WeightSource
    from verl.protocol import DataProto
    from verl.workers.config import FSDPConfig, HFModelConfig, OptimizerConfig
    from verl.workers.engine.micro_batches import MicroBatchLimits
    from verl.workers.losses import LossTotals


ROUTES = "routed_experts"
"""Tensor of a batch: the experts of its tokens, in the form of `RecordsRoutes`."""
UNKNOWN_EXPERT = -1
"""The value in `ROUTES` that lets the router choose."""
CANDIDATES = "candidates"
"""Tensor of a batch, integers [B, R, K]: K candidates for each token of a response, whose log-probs a loss needs."""
CANDIDATE_LOG_PROBS = "candidate_log_probs"
"""Tensor that FSDP engines add to a micro-batch with `CANDIDATES` before they call the loss: their log-probs, float32
[b, R, K] with gradients, 0 on padding."""


class LossFunction(Protocol):
    """A loss that does not depend on how the mini-batch is cut into micro-batches and ranks."""

    def __call__(
        self,
        log_prob: torch.Tensor,
        entropy: torch.Tensor | None,
        micro_batch: DataProto,
        totals: LossTotals,
    ) -> tuple[torch.Tensor, dict[str, float | torch.Tensor]]:
        """Return the share of `micro_batch` in the loss and the metrics of the mini-batch.

        `log_prob` and `entropy` are float32 [b, R] with gradients, 0 where `attention_mask` is 0; `entropy` is None
        unless the engine computes it. The loss is a scalar. Loss and metrics are divided by `totals` (those of the
        mini-batch over all ranks), not by the counts of `micro_batch`: the engine sums them over micro-batches and
        ranks. Every call returns the same metric names.
        """


class TrainEngine(Protocol):
    """A model that is sharded over the ranks of the default process group, and its optimizer.

    Every method except `weight_source` is a collective: all ranks call it, in the same order.
    """

    def build(self) -> None:
        """Load the model from its Hugging Face directory, shard it, make the optimizer."""

    def compute_log_prob(
        self, data: DataProto, *, temperature: float, limits: MicroBatchLimits, calculate_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs of `responses` at the sampling temperature, and entropies: float32 [B, R] on the CPU, rows as in
        `data`."""

    def train_mini_batch(
        self,
        data: DataProto,
        loss_fn: LossFunction,
        *,
        temperature: float,
        limits: MicroBatchLimits,
        calculate_entropy: bool = False,
    ) -> dict[str, float]:
        """One optimizer step on the mini-batch of which `data` is this rank's part. Metrics are equal on every rank."""

    def step_lr(self) -> float:
        """Advance the learning-rate schedule by one training step; return the previous rate."""

    def save_checkpoint(self, directory: Path, contents: Sequence[str]) -> None:
        """Write `contents` (model, optimizer, extra, hf_model) to `directory`, durably, before any rank returns."""

    def load_checkpoint(self, directory: Path, contents: Sequence[str]) -> None:
        """The inverse of `save_checkpoint`, with any number of ranks."""

    def export_hf(self, directory: Path, dtype: str | None = None) -> None:
        """Write a Hugging Face model directory in `dtype`, by default that of the parameters."""

    def weight_source(self, rollout_dtype: str = "bfloat16", kept_wide: Collection[str] = ()) -> WeightSource:
        """The parts of the weights that this rank holds, for the checkpoint engine. Not a collective.

        `rollout_dtype` does not apply to tensors that the checkpoint or transformers keeps wider, nor to `kept_wide`.
        """


@runtime_checkable
class RecordsRoutes(Protocol):
    """An engine that uses `ROUTES` of a batch as the experts of its tokens, and records them for a batch without."""

    def take_routes(self) -> torch.Tensor | None:
        """The routes of the last `compute_log_prob`, once: int16 [B, P+R, layers, experts per token], -1 on padding.

        None if the batch had routes, or routers choose in every pass.
        """


class ValueEngine(TrainEngine, Protocol):
    """The engine of a critic, with values instead of log-probs."""

    def compute_values(self, data: DataProto, *, limits: MicroBatchLimits) -> torch.Tensor:
        """Values of the states before tokens of `responses`: float32 [B, R] on the CPU, 0 on padding. A collective."""


class TrainEngineFactory(Protocol):
    """An entry of `TrainEngineRegistry`: usually a class. Called on every rank, which then calls `build`."""

    def __call__(
        self,
        *,
        model_config: HFModelConfig,
        fsdp_config: FSDPConfig,
        optim_config: OptimizerConfig | None = None,
        grad_clip: float = 1.0,
        device: torch.device | None = None,
        seed: int = 1,
        before_step: Callable[[], None] = lambda: None,
    ) -> TrainEngine:
        """An engine on `device`. Without `optim_config` it is frozen: a reference policy.

        The training thread calls `before_step` immediately before an optimizer step changes weights. It returns when no
        copy of the weights is running.
        """
