"""The Megatron training engine: build, log-probs, optimizer step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from verl.protocol import DataProto, tensors_of
from verl.utils.config import ConfigError
from verl.workers.config import HFModelConfig, OptimizerConfig
from verl.workers.config.megatron import MegatronConfig
from verl.workers.engine.adapters import in_peft
from verl.workers.engine.base import ROUTES
from verl.workers.engine.copies import same_draws
from verl.workers.engine.fsdp.mesh import DTYPES
from verl.workers.engine.fsdp.model import load_hf_config
from verl.workers.engine.fsdp.weight_source import FSDPWeightSource
from verl.workers.engine.megatron import groups, state
from verl.workers.engine.megatron.build import Builder, BuiltModel
from verl.workers.engine.megatron.export import export_hf, save_peft
from verl.workers.engine.megatron.forward import PackedBatch, response_log_probs
from verl.workers.engine.megatron.optimizer import Optimizer
from verl.workers.engine.megatron.passes import Passes, metrics_of, micro_batches_of
from verl.workers.engine.megatron.routing import RouterReplay
from verl.workers.engine.schedule import learning_rate
from verl.workers.engine.snapshots import Places, State, copy_into
from verl.workers.engine.totals import global_totals
from verl.workers.engine.training_state import (
    StateWriter,
    load_training_state,
    require_same_tensors_in,
    save_training_state,
    write_now,
)
from verl.workers.own_time import named_blocks

if TYPE_CHECKING:
    from verl.workers.engine.base import LossFunction
    from verl.workers.engine.micro_batches import MicroBatchLimits

logger = logging.getLogger(__name__)


class MegatronEngine:
    """One causal LM over all ranks of the default process group. Implements `verl.workers.engine.base.TrainEngine`.

    Tensor-, pipeline- and expert-parallel by Megatron-core, data-parallel over what ranks are left. Without
    `optim_config` it is frozen (a reference policy). The process group must exist and have a gloo backend for CPU
    tensors. Megatron's groups belong to the process: all its Megatron engines have the same layout.
    """

    labels: ClassVar[int] = 0
    """`Dimensions.labels`."""

    def __init__(
        self,
        *,
        model_config: HFModelConfig,
        megatron_config: MegatronConfig,
        optim_config: OptimizerConfig | None = None,
        grad_clip: float = 1.0,
        device: torch.device | None = None,
        seed: int = 1,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._model_config, self._config, self._optim_config = model_config, megatron_config, optim_config
        self._grad_clip, self._seed = grad_clip, seed
        self._lr_step = 0
        self.device = device or torch.device("cpu")
        self.model: torch.nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._before_step = before_step
        self._built_model: BuiltModel | None = None
        self._replay: RouterReplay | None = None
        self._routes: torch.Tensor | None = None

    def build(self) -> None:
        """Raises ConfigError for a model and layout that do not fit each other, PlanError as for every engine."""
        self._hf_config = self._load_hf_config()
        built, filled = Builder(
            model_config=self._model_config,
            config=self._config,
            hf_config=self._hf_config,
            device=self.device,
            seed=self._seed,
            labels=self.labels,
            is_trained=self._optim_config is not None,
        ).build()
        self.model, self._built_model = built.module, built
        if self._replays():
            self._replay = self._router_replay(built)
        self._passes = Passes(
            built.module,
            self._of_responses,
            device=self.device,
            multiple=built.layout.sizes.tensor if self._config.sequence_parallel else 1,
            replay=self._replay,
        )
        if self._optim_config is not None:
            self._optimizer = Optimizer(
                built.weights,
                built.trained,
                self._optim_config,
                grad_clip=self._grad_clip,
                sequence_parallel=self._config.sequence_parallel,
                distributed=self._config.use_distributed_optimizer,
            )
        if self._model_config.check_load and filled is not None:
            filled.require(f"Megatron's {self._hf_config.model_type} model")

    def _replays(self) -> bool:
        """Neither reference policies nor critics do: their passes are the only ones of a step."""
        return self._config.router_replay.mode != "disabled" and self._optim_config is not None and not self.labels

    def _require_routes(self, data: DataProto) -> None:
        if self._replay is not None and self._config.router_replay.mode == "R3" and ROUTES not in tensors_of(data):
            raise ConfigError(
                "actor_rollout_ref.actor.megatron.router_replay.mode=R3, but no sample has routed_experts: agent loops "
                "hand on what generate() returned, as routed_experts of their AgentLoopOutput"
            )

    def _router_replay(self, built: BuiltModel) -> RouterReplay:
        return RouterReplay(
            built.module,
            stage=built.layout.stage,
            num_layers=built.layout.dims.layers,
            sequence_parallel=self._config.sequence_parallel,
        )

    # ---- log-probs

    @torch.no_grad()
    def compute_log_prob(
        self, data: DataProto, *, temperature: float, limits: MicroBatchLimits, calculate_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._require_routes(data)
        data, own = groups.gather_from_model_parallel(data)
        micro_batches = micro_batches_of(data, limits)
        self._built().module.train(False)
        records = self._replay is not None and ROUTES not in tensors_of(data)
        found = self._passes.run(
            [data[indices] for indices in micro_batches],
            lambda log_prob, entropy, _: (log_prob, (log_prob.cpu(), entropy.cpu())),
            temperature=temperature,
            forward_only=True,
            records=records,
        )
        if self._replay is not None and records:
            rows, columns = tensors_of(data)["input_ids"].shape
            self._routes = self._replay.recorded(micro_batches, rows, columns)[own].clone()
        result = torch.zeros(2, *tensors_of(data)["responses"].shape)
        for indices, (log_prob, entropy) in zip(micro_batches, found, strict=False):  # none but on the last stage
            result[0, indices], result[1, indices] = log_prob, entropy
        groups.from_last_stage(result)
        return result[0, own].clone(), result[1, own].clone() if calculate_entropy else None

    def take_routes(self) -> torch.Tensor | None:
        """See `verl.workers.engine.base.RecordsRoutes`."""
        routes, self._routes = self._routes, None
        return routes

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
        if self._optimizer is None:
            raise ConfigError("a frozen engine cannot be trained")
        self._require_routes(data)
        totals = global_totals(data)
        data, _ = groups.gather_from_model_parallel(data)

        def compute(log_prob: torch.Tensor, entropy: torch.Tensor, micro_batch: DataProto) -> tuple[torch.Tensor, Any]:
            with same_draws(groups.sharing_a_loss(), self.device):
                loss, metrics = loss_fn(log_prob, entropy if calculate_entropy else None, micro_batch, totals)
            return loss, {**metrics, "loss": loss.detach()}

        self._built().module.train()
        shares = self._passes.run(
            [data[indices] for indices in micro_batches_of(data, limits)],
            compute,
            temperature=temperature,
            forward_only=False,
        )
        grad_norm = self._optimizer.step(self._lr_step, self._before_step)
        skipped = not math.isfinite(grad_norm)
        if skipped:
            logger.warning("gradient norm is %s: optimizer step skipped", grad_norm)
        return metrics_of(shares) | {"grad_norm": grad_norm, "skipped_steps": float(skipped)}

    def step_lr(self) -> float:
        if self._optim_config is None:
            raise ConfigError("a frozen engine has no learning rate")
        rate = learning_rate(self._lr_step, self._optim_config)
        self._lr_step += 1
        return rate

    def _of_responses(
        self, outputs: torch.Tensor, packed: PackedBatch, micro_batch: DataProto, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies, float32 [b, R], from the outputs of the last stage."""
        responses = tensors_of(micro_batch)["responses"]
        return response_log_probs(
            outputs, packed, responses, temperature=temperature, vocab=self._built().layout.dims.vocab
        )

    # ---- checkpoints and weights

    def save_checkpoint(self, directory: Path, contents: Sequence[str]) -> None:
        self.begin_checkpoint(directory, contents, write_now)

    def begin_checkpoint(self, directory: Path, contents: Sequence[str], write: StateWriter) -> None:
        """See `verl.workers.engine.training_state.SavesInBackground`."""
        built = self._built()
        save_training_state(
            directory, contents, self._on_disk, lr_step=self._lr_step, device=self.device.type, write=write
        )
        if "model" in contents and built.layout.adapters:
            pieces = built.layout.pieces_by_rank()
            save_peft(directory / "lora_adapter", built.checkpointed, pieces, self._model_config)
        if "hf_model" in contents:
            self.export_hf(directory / "huggingface")

    def load_checkpoint(self, directory: Path, contents: Sequence[str]) -> None:
        """Ignores `hf_model` in `contents`: it is an export; `model` is the training state."""
        if "model" in contents:
            own = self._built().checkpointed
            require_same_tensors_in(directory, {name: tensor.shape for name, tensor in own.items()})
        loaded, lr_step = load_training_state(
            directory, contents, self._on_disk, device=self.device.type, seed=self._seed
        )
        if "optimizer" in loaded and self._optimizer is not None:
            self._optimizer.steps = int(loaded["optimizer"]["step"])
        self._built().weights.publish()
        if lr_step is not None:
            self._lr_step = lr_step

    def snapshot(self) -> State:
        """See `verl.workers.engine.snapshots.Rememberable`."""
        return {"lr_step": torch.tensor(self._lr_step), **state.in_memory(self._built(), self._optimizer)}

    def restore(self, saved: State) -> None:
        copy_into(self.snapshot(), saved)
        self._lr_step = int(saved["lr_step"])
        if self._optimizer is not None:
            self._optimizer.steps = int(saved["optimizer.steps"])
        self._built().weights.publish()

    def places(self) -> Places:
        """See `verl.workers.engine.snapshots.Reshardable`."""
        return state.places(self._built(), self._optimizer)

    def export_hf(self, directory: Path, dtype: str | None = None) -> None:
        """Export in `dtype`, by default that of each tensor in the model's directory, with adapters merged."""
        built = self._built()
        export_hf(
            directory,
            built.merged(),
            built.layout.pieces_by_rank(),
            self._model_config,
            dtype=DTYPES[dtype] if dtype else None,
            own_config=self._hf_config if self.labels else None,
        )

    def weight_source(self, rollout_dtype: str = "bfloat16", kept_wide: Collection[str] = ()) -> FSDPWeightSource:
        built = self._built()
        if built.layout.adapters and self._model_config.sends_adapters:
            adapters = {in_peft(name): tensor for name, tensor in built.checkpointed.items()}
            return FSDPWeightSource(adapters, rollout_dtype=rollout_dtype)
        wide = built.kept_wide.union(kept_wide)
        return FSDPWeightSource(built.merged(), rollout_dtype=rollout_dtype, kept_wide=wide)

    # ---- helpers

    def own_blocks(self) -> list[torch.nn.Module]:
        """See `verl.workers.own_time.HasOwnBlocks`. If ranks share layers, only attention has no collectives."""
        built = self._built()
        alone = built.layout.sizes.tensor == built.layout.sizes.expert == 1
        return named_blocks(built.module, "mlp" if alone else "core_attention")

    def _load_hf_config(self) -> Any:
        return load_hf_config(self._model_config)

    def _on_disk(self, contents: Sequence[str]) -> dict[str, Any]:
        return state.on_disk(self._built(), self._optimizer, contents)

    def _built(self) -> BuiltModel:
        if self._built_model is None:
            raise RuntimeError("build() has not been called")
        return self._built_model
