"""What workers ask of a training engine, and what an engine asks of a loss. Nothing here knows FSDP."""

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
"""Tensor of a batch: the experts of its tokens, as `RecordsRoutes` tells them."""
UNKNOWN_EXPERT = -1
"""In the place of an expert there: the router chooses."""
CANDIDATES = "candidates"
"""Tensor of a batch, integers [B, R, K]: tokens that a loss has to know about, in the place of each of a response."""
CANDIDATE_LOG_PROBS = "candidate_log_probs"
"""Where an engine leaves their log-probs in a micro-batch with `CANDIDATES` before it calls the loss: float32 [b, R, K]
with gradients, 0 on padding. The FSDP engines do."""


class LossFunction(Protocol):
    """A loss that does not depend on how the mini-batch is cut into micro-batches and ranks."""

    def __call__(
        self,
        log_prob: torch.Tensor,
        entropy: torch.Tensor | None,
        micro_batch: DataProto,
        totals: LossTotals,
    ) -> tuple[torch.Tensor, dict[str, float | torch.Tensor]]:
        """The share of `micro_batch` in the loss of the mini-batch, and its share in the metrics.

        `log_prob` and `entropy` are float32 [b, R] with gradients, 0 where `attention_mask` is 0; `entropy` is None
        unless the engine was asked for it. The loss is a scalar. Loss and metrics are divided by `totals` (those of
        the mini-batch over all ranks), not by the counts of `micro_batch`: the engine adds them up over micro-batches
        and ranks. Every call returns the same metric names.
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
        """Advance the learning-rate schedule by one training step; the rate that was in force."""

    def save_checkpoint(self, directory: Path, contents: Sequence[str]) -> None:
        """Write `contents` (model, optimizer, extra, hf_model) to `directory`, durably, before any rank returns."""

    def load_checkpoint(self, directory: Path, contents: Sequence[str]) -> None:
        """The inverse, also with another number of ranks."""

    def export_hf(self, directory: Path, dtype: str | None = None) -> None:
        """Write a Hugging Face model directory, at `dtype` or that of the parameters."""

    def weight_source(self, rollout_dtype: str = "bfloat16", kept_wide: Collection[str] = ()) -> WeightSource:
        """The parts of the weights that this rank holds, for the checkpoint engine. Not a collective.

        `rollout_dtype` is not for what the checkpoint or transformers keeps wider, nor for `kept_wide`.
        """


@runtime_checkable
class RecordsRoutes(Protocol):
    """An engine that takes `ROUTES` of a batch for the experts of its tokens, and tells them where a batch has none."""

    def take_routes(self) -> torch.Tensor | None:
        """Of the rows of the last `compute_log_prob`, once: int16 [B, P+R, layers, experts per token], -1 on padding.

        None: they were given, or experts are chosen anew in every pass.
        """


class ValueEngine(TrainEngine, Protocol):
    """A critic: where other engines have log-probs, it has values."""

    def compute_values(self, data: DataProto, *, limits: MicroBatchLimits) -> torch.Tensor:
        """Of the state before each token of `responses`: float32 [B, R] on the CPU, 0 on padding. A collective."""


class TrainEngineFactory(Protocol):
    """What `TrainEngineRegistry` holds: usually a class. Called on every rank; `build` comes later."""

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

        The thread that trains calls `before_step` last thing before an optimizer step changes weights. It returns when
        nothing is being copied out of them.
        """
