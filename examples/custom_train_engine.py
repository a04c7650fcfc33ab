"""A training engine without sharding: one rank, plain transformers, AdamW.

Implements `verl.workers.engine.base.TrainEngine` and, for the checkpoint engine, `WeightSource`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.checkpoint_engine.plan.types import Box, Shard, TensorSpec
from verl.protocol import DataProto, tensors_of
from verl.workers.config import FSDPConfig, HFModelConfig, OptimizerConfig
from verl.workers.engine.base import LossFunction
from verl.workers.engine.decay import decay_groups
from verl.workers.engine.fsdp.forward import response_log_probs
from verl.workers.engine.fsdp.mesh import DTYPES
from verl.workers.engine.micro_batches import MicroBatchLimits, partition, sequence_widths
from verl.workers.engine.registry import TrainEngineRegistry
from verl.workers.engine.schedule import learning_rate
from verl.workers.losses import LossTotals


class WholeModelSource:
    """One rank that holds every tensor whole."""

    def __init__(self, model: torch.nn.Module, rollout_dtype: str, kept_wide: Collection[str] = ()) -> None:
        # named_parameters names a tied tensor once, as a Hugging Face checkpoint does.
        self._tensors = dict(model.named_parameters())
        self._dtypes = dict.fromkeys(self._tensors, rollout_dtype) | dict.fromkeys(kept_wide, "float32")

    def specs(self) -> Sequence[TensorSpec]:
        return [
            TensorSpec(name=name, shape=tuple(tensor.shape), dtype=self._dtypes[name])
            for name, tensor in self._tensors.items()
        ]

    def shards(self) -> Sequence[Shard]:
        return [Shard(name, Box.whole(tuple(tensor.shape))) for name, tensor in self._tensors.items()]

    @torch.no_grad()
    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        """`shard` is a piece of one of `shards()`: cut along any dimension, at most `block_kilobytes` long."""
        part = tuple(map(slice, shard.box.start, shard.box.stop))
        destination.copy_(self._tensors[shard.name][part])  # casts on the way


@TrainEngineRegistry.register("single_rank")
class SingleRankEngine:
    """See `TrainEngine`: here every method is a collective of one. On the CPU, in float32, whatever it is told."""

    def __init__(
        self,
        *,
        model_config: HFModelConfig,
        fsdp_config: FSDPConfig | None = None,
        optim_config: OptimizerConfig | None = None,
        grad_clip: float = 1.0,
        device: torch.device | None = None,
        seed: int = 1,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._model_config, self._grad_clip = model_config, grad_clip
        self._optim_config = optim_config or OptimizerConfig()  # a reference policy is never trained
        self._lr_step = 0
        self._before_step = before_step

    def build(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self._model_config.path, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(
            decay_groups(self.model.named_parameters(), self._optim_config),
            lr=learning_rate(0, self._optim_config),
            betas=(self._optim_config.betas[0], self._optim_config.betas[1]),
        )

    @torch.no_grad()
    def compute_log_prob(
        self, data: DataProto, *, temperature: float, limits: MicroBatchLimits, calculate_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.model.eval()
        log_probs = torch.zeros(tensors_of(data)["responses"].shape)
        entropies = torch.zeros_like(log_probs)
        for indices in partition(sequence_widths(data), limits):
            log_probs[indices], entropy = response_log_probs(
                self.model, data[indices], temperature=temperature, calculate_entropy=calculate_entropy
            )
            if entropy is not None:
                entropies[indices] = entropy
        return log_probs, entropies if calculate_entropy else None

    def train_mini_batch(
        self,
        data: DataProto,
        loss_fn: LossFunction,
        *,
        temperature: float,
        limits: MicroBatchLimits,
        calculate_entropy: bool = False,
    ) -> dict[str, float]:
        self.model.train()
        totals = LossTotals.of(tensors_of(data)["response_mask"])  # with several ranks: their sum
        sums: dict[str, float] = {}
        for indices in partition(sequence_widths(data), limits):
            micro_batch = data[indices]
            log_prob, entropy = response_log_probs(
                self.model, micro_batch, temperature=temperature, calculate_entropy=calculate_entropy
            )
            loss, metrics = loss_fn(log_prob, entropy, micro_batch, totals)
            loss.backward()  # losses are shares of the mini-batch's: gradients and metrics add up
            for name, value in {**metrics, "loss": loss.detach()}.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._grad_clip))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._lr_step, self._optim_config)
        self._before_step()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return sums | {"grad_norm": grad_norm, "skipped_steps": 0.0}

    def step_lr(self) -> float:
        rate = learning_rate(self._lr_step, self._optim_config)
        self._lr_step += 1
        return rate

    def save_checkpoint(self, directory: Path, contents: Sequence[str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        state = {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict(), "extra": self._lr_step}
        torch.save({name: state[name] for name in state if name in contents}, directory / "state.pt")
        if "hf_model" in contents:
            self.export_hf(directory / "huggingface")

    def load_checkpoint(self, directory: Path, contents: Sequence[str]) -> None:
        state = torch.load(directory / "state.pt", weights_only=True)
        if "model" in contents:
            self.model.load_state_dict(state["model"])
        if "optimizer" in contents:
            self._optimizer.load_state_dict(state["optimizer"])
        if "extra" in contents:
            self._lr_step = state["extra"]

    def export_hf(self, directory: Path, dtype: str | None = None) -> None:
        model = self.model if dtype is None else copy.deepcopy(self.model).to(DTYPES[dtype])
        model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(self._model_config.path).save_pretrained(directory)

    def weight_source(self, rollout_dtype: str = "bfloat16", kept_wide: Collection[str] = ()) -> WholeModelSource:
        return WholeModelSource(self.model, rollout_dtype, kept_wide)
