"""The FSDP training engines: build, log-probs, optimizer step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from verl.protocol import DataProto, tensors_of
from verl.utils.config import ConfigError
from verl.utils.pictures import MULTI_MODAL_DATA, SEEN, PictureError, PictureProcessor, media_in
from verl.workers.config import FSDPConfig, HFModelConfig, OptimizerConfig
from verl.workers.engine.copies import gather_rows, same_draws
from verl.workers.engine.decay import decay_groups
from verl.workers.engine.fsdp import snapshot
from verl.workers.engine.fsdp.checkpoint import load_training_state, save_training_state
from verl.workers.engine.fsdp.export import export_hf
from verl.workers.engine.fsdp.forward import response_log_probs
from verl.workers.engine.fsdp.mesh import DTYPES, sharers_of
from verl.workers.engine.fsdp.model import CAUSAL_LM, BuiltModel, Head, build_model, require_packing_is_not_asked
from verl.workers.engine.fsdp.weight_source import FSDPWeightSource
from verl.workers.engine.micro_batches import partition, sequence_lengths, sequence_widths, split_to_count
from verl.workers.engine.schedule import learning_rate
from verl.workers.engine.snapshots import Places, State, copy_into
from verl.workers.engine.tensors import as_in_checkpoint, named_parameters
from verl.workers.engine.totals import global_totals, largest_count, sum_over_ranks, sums_of
from verl.workers.engine.training_state import StateWriter, write_now
from verl.workers.hf.dropout import train
from verl.workers.hf.packing import keeps_sequences_apart
from verl.workers.hf.probing import Way
from verl.workers.hf.regimes import Regimes
from verl.workers.hf.seeing import Sight
from verl.workers.hf.sharers import Sharers
from verl.workers.hf.splitting import KEY, computes_shared
from verl.workers.own_time import named_blocks

if TYPE_CHECKING:
    from verl.workers.engine.base import LossFunction
    from verl.workers.engine.fsdp.lora import Adapters
    from verl.workers.engine.fsdp.sharding import Sharding
    from verl.workers.engine.micro_batches import MicroBatchLimits

logger = logging.getLogger(__name__)


class FSDPEngine:
    """One causal LM over all ranks of the default process group. Implements `verl.workers.engine.base.TrainEngine`.

    Without `optim_config` it is frozen and only computes log-probs (a reference policy). The process group must exist
    and have a gloo backend for CPU tensors (`verl.utils.device.distributed_backend`). Subclasses say how it is sharded.
    """

    sharding: ClassVar[Sharding]
    head: ClassVar[Head] = CAUSAL_LM

    def __init__(
        self,
        *,
        model_config: HFModelConfig,
        fsdp_config: FSDPConfig,
        optim_config: OptimizerConfig | None = None,
        grad_clip: float = 1.0,
        device: torch.device | None = None,
        seed: int = 1,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._model_config = model_config
        self._fsdp_config = fsdp_config
        self._optim_config = optim_config
        self._grad_clip = grad_clip
        self._seed = seed
        self._lr_step = 0
        self.device = device or torch.device("cpu")
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self._adapters: Adapters | None = None
        self._built_model: BuiltModel | None = None
        self._packs = False
        """Whether the sequences of a micro-batch go through the model in one row."""
        self._sharers = Sharers()
        """The ranks that compute each such row together."""
        self._regimes = Regimes(nn.Module())
        self._processor: PictureProcessor | None = None
        self._before_step = before_step

    def build(self) -> None:
        trainable = self._optim_config is not None
        self._sharers = sharers_of(self._fsdp_config.ulysses_sequence_parallel_size)
        built = build_model(
            self._model_config,
            self._fsdp_config,
            self.device,
            self.sharding,
            trainable=trainable,
            head=self.head,
            seed=self._seed,
        )
        self.model, self._adapters, self._built_model = built.module, built.adapters, built
        self._processor = built.processor
        self._regimes = Regimes(self.model)
        if self._regimes:
            self.model.register_forward_pre_hook(lambda module, args: self._regimes.forget())
        if self._sharers.size > 1:
            self._require_shared()
        self._packs = self._sharers.size > 1 or (built.together.way is Way.PACKED and self._keeps_sequences_apart())
        if self._optim_config is not None:
            whole = {name: len(held.shape) for name, held in self.sharding.held(self.model).items()}
            trained = ((name, each) for name, each in named_parameters(self.model) if each.requires_grad)
            self.optimizer = torch.optim.AdamW(
                decay_groups(trained, self._optim_config, whole),
                lr=learning_rate(0, self._optim_config),
                betas=(self._optim_config.betas[0], self._optim_config.betas[1]),
                fused=True,
            )

    # ---- log-probs

    @torch.no_grad()
    def compute_log_prob(
        self, data: DataProto, *, temperature: float, limits: MicroBatchLimits, calculate_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        model = self._built()
        model.train(False)
        data, own = gather_rows(data, self._sharers.group)
        log_probs = torch.zeros(tensors_of(data)["responses"].shape, dtype=torch.float32)
        entropies = torch.zeros_like(log_probs) if calculate_entropy else None
        for indices in self._micro_batches(data, limits):
            log_prob, entropy = self._forward(self._take(data, indices), temperature, calculate_entropy)
            log_probs[indices] = log_prob.cpu()
            if entropies is not None and entropy is not None:
                entropies[indices] = entropy.cpu()
        self.sharding.reshard(model)
        if self._sharers.size == 1:
            return log_probs, entropies
        return log_probs[own].clone(), None if entropies is None else entropies[own].clone()

    # ---- training

    def train_mini_batch(
        self,
        data: DataProto,
        loss_fn: LossFunction,
        *,
        temperature: float,
        limits: MicroBatchLimits,
        calculate_entropy: bool = False,
    ) -> dict[str, float]:
        """Also returns `loss`, `grad_norm` (before clipping) and `skipped_steps` (1 if that norm was not finite)."""
        model = self._built()
        train(model, drops=self._model_config.drops)
        totals = global_totals(data)
        data, _ = gather_rows(data, self._sharers.group)
        shares: list[dict[str, float | torch.Tensor]] = []
        for indices in self._micro_batches(data, limits):
            micro_batch = self._take(data, indices)
            log_prob, entropy = self._forward(micro_batch, temperature, calculate_entropy)
            with same_draws(self._sharers.group, self.device):
                loss, metrics = loss_fn(log_prob, entropy, micro_batch, totals)
            # FSDP averages gradients over ranks; the loss is a sum over them.
            torch.autograd.backward(loss * dist.get_world_size())
            shares.append({**metrics, "loss": loss.detach()})
        grad_norm = self._optimizer_step()
        sums = {name: value / self._sharers.size for name, value in sums_of(shares).items()}  # each has all of it
        return sum_over_ranks(sums) | {"grad_norm": grad_norm, "skipped_steps": float(not math.isfinite(grad_norm))}

    def step_lr(self) -> float:
        if self._optim_config is None:
            raise ConfigError("a frozen engine has no learning rate")
        rate = learning_rate(self._lr_step, self._optim_config)
        self._lr_step += 1
        return rate

    def _optimizer_step(self) -> float:
        """Clip, step unless the norm is not finite, clear the gradients; the norm over all ranks before clipping."""
        if self.optimizer is None or self._optim_config is None:
            raise ConfigError("a frozen engine cannot be trained")
        grad_norm = self.sharding.clip_grad_norm(self._built(), self._grad_clip)
        if math.isfinite(grad_norm):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self._lr_step, self._optim_config)
            self._move_optimizer_state(self.device)
            self._before_step()
            self.optimizer.step()
            if self._fsdp_config.optimizer_offload:
                self._move_optimizer_state(torch.device("cpu"))
            if self._adapters is not None:
                self._adapters.gather()
        else:
            logger.warning("gradient norm is %s: optimizer step skipped", grad_norm)
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def _move_optimizer_state(self, device: torch.device) -> None:
        """Moments follow their parameters, unless they are parked in host memory between steps."""
        if self.optimizer is None or not self._fsdp_config.optimizer_offload or self._fsdp_config.param_offload:
            return
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.to(device)

    # ---- checkpoints and weights

    def save_checkpoint(self, directory: Path, contents: Sequence[str]) -> None:
        self.begin_checkpoint(directory, contents, write_now)

    def begin_checkpoint(self, directory: Path, contents: Sequence[str], write: StateWriter) -> None:
        """See `verl.workers.engine.training_state.SavesInBackground`."""
        save_training_state(
            directory,
            contents,
            model=self._resharded(),
            optimizer=self.optimizer,
            lr_step=self._lr_step,
            device=self.device.type,
            write=write,
        )
        if "model" in contents and self._adapters is not None:
            self._adapters.save_peft(directory / "lora_adapter")
        if "hf_model" in contents:
            self.export_hf(directory / "huggingface")

    def load_checkpoint(self, directory: Path, contents: Sequence[str]) -> None:
        """Ignores `hf_model` in `contents`: it is an export; `model` is the training state."""
        lr_step = load_training_state(
            directory,
            contents,
            model=self._resharded(),
            optimizer=self.optimizer,
            device=self.device.type,
            seed=self._seed,
        )
        if self._adapters is not None:
            self._adapters.gather()
        if lr_step is not None:
            self._lr_step = lr_step

    def snapshot(self) -> State:
        """See `verl.workers.engine.snapshots.Rememberable`."""
        model, optimizer = self._resharded(), self.optimizer
        moments = snapshot.moments(optimizer) if optimizer is not None else {}
        return {**snapshot.weights(model, self.sharding), **moments, "lr_step": torch.tensor(self._lr_step)}

    def restore(self, saved: State) -> None:
        copy_into(self.snapshot(), saved)
        self._lr_step = int(saved["lr_step"])
        if self._adapters is not None:
            self._adapters.gather()

    def places(self) -> Places:
        """See `verl.workers.engine.snapshots.Reshardable`."""
        model, optimizer = self._resharded(), self.optimizer
        moments = snapshot.places_of_moments(optimizer, model, self.sharding) if optimizer is not None else {}
        return {**snapshot.places_of_weights(model, self.sharding), **moments}

    def export_hf(self, directory: Path, dtype: str | None = None) -> None:
        """Export in `dtype`, by default that of each tensor in the model's directory, with adapters merged."""
        self._resharded()
        assert self._built_model is not None
        export_hf(directory, self._built_model, self._model_config, dtype=DTYPES[dtype] if dtype else None)

    def weight_source(self, rollout_dtype: str = "bfloat16", kept_wide: Collection[str] = ()) -> FSDPWeightSource:
        tensors = self.sharding.held(self._built())
        if self._adapters is not None:
            tensors = self._adapters.sent(tensors)
        if self._model_config.sends_adapters:
            return FSDPWeightSource(tensors, rollout_dtype=rollout_dtype)
        assert self._built_model is not None
        tensors = as_in_checkpoint(tensors, self._built_model.conversion)
        wide = self._built_model.kept_wide.union(kept_wide)
        return FSDPWeightSource(tensors, rollout_dtype=rollout_dtype, kept_wide=wide)

    # ---- helpers

    def own_blocks(self) -> list[nn.Module]:
        """See `verl.workers.own_time.HasOwnBlocks`. Empty for a model without modules of these names."""
        return named_blocks(self._built(), "mlp")

    def _forward(
        self, micro_batch: DataProto, temperature: float, calculate_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What losses are made of, float32 [b, R]."""
        return response_log_probs(
            self._built(),
            micro_batch,
            temperature=temperature,
            calculate_entropy=calculate_entropy,
            pack=self._packs,
            sharers=self._sharers,
            sight=self._sight(micro_batch),
        )

    def _sight(self, micro_batch: DataProto) -> Sight | None:
        """Of data some of which have pictures. Raises PictureError if the rollout engine saw others, and for a model
        that reads text alone."""
        given = micro_batch.non_tensor_batch.get(MULTI_MODAL_DATA, ())
        pictures = [media_in(each) for each in given]
        if self._processor is None:
            if any(pictures):
                raise PictureError(f"samples have pictures, and {self._model_config.path} is trained on text alone")
            return None
        if MULTI_MODAL_DATA not in micro_batch.non_tensor_batch:
            return None
        for own, by_engine in zip(pictures, micro_batch.non_tensor_batch.get(SEEN, ()), strict=False):
            self._processor.require_same(own, by_engine)
        with_videos = any("videos" in each for each in given)
        return Sight(processor=self._processor, pictures=pictures, with_videos=with_videos)

    def _keeps_sequences_apart(self) -> bool:
        model = self._built()
        model.train(False)
        apart = keeps_sequences_apart(model, self.device)
        self.sharding.reshard(model)
        if not apart:
            assert self._built_model is not None
            name = self._built_model.conversion.model
            require_packing_is_not_asked(self._model_config, f"{name} mixes sequences that are in one row")
            if dist.get_rank() == 0:
                logger.info(
                    "model.use_remove_padding: %s mixes sequences that are in one row; each has a row of its own", name
                )
        return apart

    def _require_shared(self) -> None:
        """Raises ConfigError for a model whose rows ranks cannot share. A collective."""
        assert self._built_model is not None
        what = f"{KEY}={self._sharers.size}: the model {self._built_model.conversion.model}"
        if self._built_model.together.way is not Way.PACKED:
            raise ConfigError(f"{what} cannot be shared: {self._built_model.together.why}")
        try:
            apart = self._keeps_sequences_apart()
            shared = apart and computes_shared(self._built(), self._sharers, self.device)
        except TypeError as exc:
            raise ConfigError(f"{what} cannot be shared: {exc}") from exc
        self.sharding.reshard(self._built())
        if not apart:
            raise ConfigError(f"{what} mixes sequences that are in one row")
        if not shared:
            raise ConfigError(f"{what} looks at other tokens in more than attention over heads")

    def _built(self) -> nn.Module:
        if self.model is None:
            raise RuntimeError("build() has not been called")
        return self.model

    def _resharded(self) -> nn.Module:
        """The model with every parameter as this rank holds it."""
        self.sharding.reshard(model := self._built())
        return model

    def _micro_batches(self, data: DataProto, limits: MicroBatchLimits) -> list[list[int]]:
        """Index groups of `data`, equally many on every rank: each forward pass gathers parameters from all ranks."""
        if limits.max_tokens is not None:
            limits = replace(limits, max_tokens=limits.max_tokens * self._sharers.size)
        groups = partition(sequence_widths(data), limits, packed=self._packs, regimes=self._regimes_of(data))
        return split_to_count(groups, largest_count(len(groups)))

    def _regimes_of(self, data: DataProto) -> Sequence[Hashable] | None:
        """Of its sequences: equal ones may share a micro-batch. None if all may."""
        assert self._built_model is not None
        if self._built_model.together.way is Way.ALONE:
            return range(len(data))
        return [self._regimes.of(length) for length in sequence_lengths(data)] if self._regimes else None

    def _take(self, data: DataProto, indices: list[int]) -> DataProto:
        return data[indices].to(self.device)
