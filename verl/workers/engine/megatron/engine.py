"""The Megatron training engine: build, log-probs, optimizer step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from verl.protocol import DataProto, tensors_of
from verl.utils.config import ConfigError
from verl.workers.config import HFModelConfig, OptimizerConfig
from verl.workers.config.megatron import MegatronConfig
from verl.workers.engine.adapters import in_peft, initialize
from verl.workers.engine.base import ROUTES
from verl.workers.engine.copies import same_draws
from verl.workers.engine.filling import fill, require_equal
from verl.workers.engine.fsdp.mesh import DTYPES
from verl.workers.engine.fsdp.model import load_hf_config
from verl.workers.engine.fsdp.tensors import HeldTensor
from verl.workers.engine.fsdp.weight_source import FSDPWeightSource
from verl.workers.engine.megatron import cpu, groups, library
from verl.workers.engine.megatron.adapted import with_adapters
from verl.workers.engine.megatron.architectures import EMBEDDING_NAME, TIED_NAME, architecture_of
from verl.workers.engine.megatron.checkpoint import HeldInCheckpoint
from verl.workers.engine.megatron.checks import check, sizes_of
from verl.workers.engine.megatron.dist_checkpoint import load_weights
from verl.workers.engine.megatron.export import export_hf, save_peft
from verl.workers.engine.megatron.forward import PackedBatch, response_log_probs
from verl.workers.engine.megatron.held import held_tensors
from verl.workers.engine.megatron.layout import Dimensions, LocalTensor, Piece, local_tensors
from verl.workers.engine.megatron.library import (
    model_parallel_cuda_manual_seed,
    parallel_state,
    schedules,
)
from verl.workers.engine.megatron.lora import attach, keep_gradients, merged
from verl.workers.engine.megatron.model import make_model, require_same_tensors
from verl.workers.engine.megatron.optimizer import Optimizer, Weights
from verl.workers.engine.megatron.routing import RouterReplay
from verl.workers.engine.micro_batches import partition, sequence_widths, split_to_count
from verl.workers.engine.schedule import learning_rate
from verl.workers.engine.snapshots import Place, Places, State, copy_into
from verl.workers.engine.totals import global_totals, largest_count, sum_over_ranks
from verl.workers.engine.training_state import (
    StateWriter,
    load_training_state,
    require_same_tensors_in,
    save_training_state,
    write_now,
)
from verl.workers.hf.checkpoint import HFCheckpoint
from verl.workers.hf.precision import names_kept_wide, require_precision
from verl.workers.own_time import named_blocks

if TYPE_CHECKING:
    from verl.workers.engine.base import LossFunction
    from verl.workers.engine.micro_batches import MicroBatchLimits

logger = logging.getLogger(__name__)

Compute = Callable[[torch.Tensor, torch.Tensor, DataProto], tuple[torch.Tensor, Any]]
"""(log-probs, entropies, micro-batch) -> what to minimise, and what to return for the micro-batch."""


class MegatronEngine:
    """One causal LM over all ranks of the default process group. Implements `verl.workers.engine.base.TrainEngine`.

    Tensor-, pipeline- and expert-parallel by Megatron-core, data-parallel over what ranks are left. Without
    `optim_config` it is frozen (a reference policy). The process group must exist and have a gloo backend for CPU
    tensors. Megatron's groups belong to the process: all its Megatron engines have the same layout.
    """

    labels: ClassVar[int] = 0
    """As in `Dimensions`."""

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
        self._adapters: Mapping[str, tuple[int, ...]] = {}
        """The shapes of all of them, in the order of Hugging Face's model."""
        self._scale = model_config.lora_alpha / (model_config.lora_rank or 1)
        self._replay: RouterReplay | None = None
        self._routes: torch.Tensor | None = None

    def build(self) -> None:
        """Raises ConfigError for a model and layout that do not fit each other, PlanError as for every engine."""
        if self.device.type == "cpu":
            cpu.adapt()
        config = self._config
        self._hf_config = self._load_hf_config()
        self._architecture = architecture_of(self._hf_config.model_type)
        self._sizes = sizes_of(config, dist.get_world_size())
        if self._optim_config is not None and self._model_config.lora_rank:
            self._architecture, self._adapters = with_adapters(self._model_config, self._hf_config)
        with HFCheckpoint(Path(self._model_config.path)) as checkpoint:
            check(
                config,
                self._hf_config,
                world=dist.get_world_size(),
                device=self.device.type,
                checkpoint=checkpoint,
                labels=self.labels,
            )
            self._dims = Dimensions.of(
                self._hf_config,
                padded_vocab=config.padded_vocab(self._hf_config.vocab_size),
                labels=self.labels,
                rank=self._model_config.lora_rank,
            )
            groups.join(self._sizes)
            if self.device.type != "cpu":
                model_parallel_cuda_manual_seed(self._seed)
            recompute = self._optim_config is not None and (
                self._model_config.enable_gradient_checkpointing
                or config.override_transformer_config.get("recompute_granularity") is not None
            )
            self.model = make_model(
                self._hf_config,
                config,
                architecture=self._architecture,
                dims=self._dims,
                sizes=self._sizes,
                device=self.device,
                recompute=recompute,
            )
            self._tensors = self._tensors_of(dist.get_rank())
            if self._adapters:
                attach(self.model, self._tensors, self._dims, self._sizes, scale=self._scale)
                if recompute:
                    keep_gradients(self.model)
            require_same_tensors(self.model, self._tensors)
            if self._replays():
                self._replay = self._router_replay(self.model)
            self._dtypes = self._dtypes_of(checkpoint)
            trained = [tensor for tensor in self._tensors if self._is_trained(tensor)]
            self._weights = Weights(
                self.model,
                {tensor.name: self._dtypes[tensor.row.is_adapter] for tensor in self._tensors},
                trained=[tensor.name for tensor in trained],
            )
            self._held = self._in_hf_names(self._weights.tensors)
            if self._optim_config is not None:
                require_precision(self._held.keys() & checkpoint.names, checkpoint, self._dtypes[False])
            self._kept_wide = names_kept_wide({name: tensor.shape for name, tensor in self._held.items()}, checkpoint)
            filled = fill(self._held, checkpoint, zero=self._held.keys() - checkpoint.names)  # a new head is 0
            initialize({name: self._held[name] for name in self._adapters}, self._seed)
            if self._dims.tied and TIED_NAME in checkpoint.names and EMBEDDING_NAME in self._held:
                require_equal(EMBEDDING_NAME, TIED_NAME, self._held[EMBEDDING_NAME], checkpoint)
        if other := self._first_weights():
            base = {
                tensor.name: self._weights.tensors[tensor.name] for tensor in self._tensors if not tensor.row.is_adapter
            }
            load_weights(self.model, base, other, config.dist_checkpointing_prefix)
        self._weights.publish()
        if self._optim_config is not None:
            self._optimizer = Optimizer(
                self._weights,
                trained,
                self._optim_config,
                grad_clip=self._grad_clip,
                sequence_parallel=config.sequence_parallel,
                distributed=config.use_distributed_optimizer,
            )
        if self._model_config.check_load and other is None:
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

    def _router_replay(self, model: torch.nn.Module) -> RouterReplay:
        stages = self._sizes.stages(self._dims.layers)
        assert stages is not None  # checked before any process started
        return RouterReplay(
            model,
            stage=stages[self._sizes.of(dist.get_rank()).pipeline],
            num_layers=self._dims.layers,
            sequence_parallel=self._config.sequence_parallel,
        )

    def _is_trained(self, tensor: LocalTensor) -> bool:
        return self._optim_config is not None and tensor.row.is_adapter == bool(self._adapters)

    def _dtypes_of(self, checkpoint: HFCheckpoint) -> dict[bool, torch.dtype]:
        """Of what is kept of adapters (true) and of the rest. What is not trained needs nothing beside the model's own,
        unless that rounds what is exported."""
        computed, kept = DTYPES[self._config.dtype], DTYPES[self._config.model_dtype]
        if self._optim_config is None:
            return {True: computed, False: computed}
        in_files = {checkpoint.dtype(name) for name in checkpoint.names}
        return {True: kept, False: computed if self._adapters and in_files == {computed} else kept}

    def _first_weights(self) -> Path | None:
        """The distributed checkpoint from which they come instead. Those of a critic do not."""
        path = self._config.dist_checkpointing_path
        return Path(path).expanduser() if self._config.use_dist_checkpointing and path and not self.labels else None

    # ---- log-probs

    @torch.no_grad()
    def compute_log_prob(
        self, data: DataProto, *, temperature: float, limits: MicroBatchLimits, calculate_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._require_routes(data)
        data, own = groups.gather_from_model_parallel(data)
        micro_batches = self._micro_batches(data, limits)
        self._built().train(False)
        records = self._replay is not None and ROUTES not in tensors_of(data)
        found = self._run(
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

        self._built().train()
        shares = self._run(
            [data[indices] for indices in self._micro_batches(data, limits)],
            compute,
            temperature=temperature,
            forward_only=False,
        )
        grad_norm = self._optimizer.step(self._lr_step, self._before_step)
        skipped = not math.isfinite(grad_norm)
        if skipped:
            logger.warning("gradient norm is %s: optimizer step skipped", grad_norm)
        return self._metrics(shares) | {"grad_norm": grad_norm, "skipped_steps": float(skipped)}

    def step_lr(self) -> float:
        if self._optim_config is None:
            raise ConfigError("a frozen engine has no learning rate")
        rate = learning_rate(self._lr_step, self._optim_config)
        self._lr_step += 1
        return rate

    def _metrics(self, shares: list[dict[str, Any]]) -> dict[str, float]:
        """Their sums over micro-batches and data-parallel ranks, on all ranks; `shares` are the last stage's."""
        sums: dict[str, float] = {}
        for share in shares:
            for name, value in share.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        if not parallel_state.is_pipeline_last_stage():
            return groups.record_from_last_stage(None)
        return groups.record_from_last_stage(sum_over_ranks(sums, parallel_state.get_data_parallel_group()))

    @library.quiet()
    def _run(
        self,
        micro_batches: list[DataProto],
        compute: Compute,
        *,
        temperature: float,
        forward_only: bool,
        records: bool = False,
    ) -> list[Any]:
        """Megatron's schedule over `micro_batches`; what `compute` returned for each, on the last stage."""
        if self._replay is not None:
            self._replay.begin(records=records)

        def forward(batches: Iterator[DataProto], model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
            micro_batch = next(batches).to(self.device)
            packed = PackedBatch.of(micro_batch, multiple=self._sizes.tensor if self._config.sequence_parallel else 1)

            def finish(outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
                log_prob, entropy = self._of_responses(outputs, packed, micro_batch, temperature)
                loss, result = compute(log_prob, entropy, micro_batch)
                # Three values: Megatron then neither divides the loss nor counts tokens.
                return loss, torch.zeros((), dtype=torch.int), result

            with self._along_routes(packed, micro_batch):
                return model(packed.input_ids, None, packed.attention_mask), finish

        found: list[Any] = schedules.get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(micro_batches),
            model=self._built(),
            num_microbatches=len(micro_batches),
            seq_length=1,  # shapes travel with the activations
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return found

    def _along_routes(self, packed: PackedBatch, micro_batch: DataProto) -> AbstractContextManager[None]:
        if self._replay is None:
            return nullcontext()
        return self._replay.forward_pass(packed, tensors_of(micro_batch).get(ROUTES, None))

    def _of_responses(
        self, outputs: torch.Tensor, packed: PackedBatch, micro_batch: DataProto, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies, float32 [b, R], from the outputs of the last stage."""
        responses = tensors_of(micro_batch)["responses"]
        return response_log_probs(outputs, packed, responses, temperature=temperature, vocab=self._dims.vocab)

    # ---- checkpoints and weights

    def save_checkpoint(self, directory: Path, contents: Sequence[str]) -> None:
        self.begin_checkpoint(directory, contents, write_now)

    def begin_checkpoint(self, directory: Path, contents: Sequence[str], write: StateWriter) -> None:
        """See `verl.workers.engine.training_state.SavesInBackground`."""
        save_training_state(
            directory, contents, self._training_state, lr_step=self._lr_step, device=self.device.type, write=write
        )
        if "model" in contents and self._adapters:
            save_peft(directory / "lora_adapter", self._trained(), self._pieces_by_rank(), self._model_config)
        if "hf_model" in contents:
            self.export_hf(directory / "huggingface")

    def load_checkpoint(self, directory: Path, contents: Sequence[str]) -> None:
        """`hf_model` in `contents` means nothing here: it is an export, the training state is `model`."""
        if "model" in contents:
            require_same_tensors_in(directory, {name: tensor.shape for name, tensor in self._trained().items()})
        state, lr_step = load_training_state(
            directory, contents, self._training_state, device=self.device.type, seed=self._seed
        )
        if "optimizer" in state and self._optimizer is not None:
            self._optimizer.steps = int(state["optimizer"]["step"])
        self._weights.publish()
        if lr_step is not None:
            self._lr_step = lr_step

    def snapshot(self) -> State:
        """See `verl.workers.engine.snapshots.Rememberable`."""
        state = {"lr_step": torch.tensor(self._lr_step)}
        state |= {f"model.{name}": tensor.detach() for name, tensor in self._weights.trained().items()}
        if self._optimizer is not None:
            state["optimizer.steps"] = torch.tensor(self._optimizer.steps)
            for kind, own in self._optimizer.moments().items():
                state |= {f"optimizer.{kind}.{name}": tensor for name, tensor in own.items()}
        return state

    def restore(self, saved: State) -> None:
        copy_into(self.snapshot(), saved)
        self._lr_step = int(saved["lr_step"])
        if self._optimizer is not None:
            self._optimizer.steps = int(saved["optimizer.steps"])
        self._weights.publish()

    def places(self) -> Places:
        """See `verl.workers.engine.snapshots.Reshardable`. Rows that pad the vocabulary are nobody's."""
        kinds = {"model": self._weights.trained()}
        if self._optimizer is not None:
            kinds |= {f"optimizer.{kind}": own for kind, own in self._optimizer.moments().items()}
        return {
            f"{kind}.{tensor.name}": [Place(f"{kind}.{p.name}", p.box, p.local_box) for p in tensor.pieces]
            for kind, own in kinds.items()
            for tensor in self._tensors
            if tensor.name in own
        }

    def export_hf(self, directory: Path, dtype: str | None = None) -> None:
        """At `dtype`, by default that of each tensor in the model's directory. Adapters are merged into the weights."""
        export_hf(
            directory,
            merged(self._held, self._scale),
            self._pieces_by_rank(),
            self._model_config,
            dtype=DTYPES[dtype] if dtype else None,
            own_config=self._hf_config if self.labels else None,
        )

    def weight_source(self, rollout_dtype: str = "bfloat16", kept_wide: Collection[str] = ()) -> FSDPWeightSource:
        self._built()
        if self._adapters and self._model_config.sends_adapters:
            adapters = {in_peft(name): tensor for name, tensor in self._trained().items()}
            return FSDPWeightSource(adapters, rollout_dtype=rollout_dtype)
        wide = self._kept_wide.union(kept_wide)
        return FSDPWeightSource(merged(self._held, self._scale), rollout_dtype=rollout_dtype, kept_wide=wide)

    # ---- helpers

    def own_blocks(self) -> list[torch.nn.Module]:
        """See `verl.workers.own_time.HasOwnBlocks`. Where ranks share a layer only its attention is a rank's own."""
        alone = self._sizes.tensor == self._sizes.expert == 1
        return named_blocks(self._built(), "mlp" if alone else "core_attention")

    def _load_hf_config(self) -> Any:
        return load_hf_config(self._model_config)

    def _training_state(self, contents: Sequence[str]) -> dict[str, Any]:
        """What DCP writes from and reads into, in place."""
        state: dict[str, Any] = {}
        if "model" in contents:
            state["model"] = _in_checkpoint(self._trained())
        if "optimizer" in contents and self._optimizer is not None:
            moments = self._optimizer.moments()
            state["optimizer"] = {kind: _in_checkpoint(self._in_hf_names(own)) for kind, own in moments.items()}
            state["optimizer"]["step"] = torch.tensor(float(self._optimizer.steps))
        return state

    def _trained(self) -> dict[str, HeldTensor]:
        """What checkpoints hold: the base of adapters is in the model's directory."""
        return {name: self._held[name] for name in self._adapters} or self._held

    def _pieces_by_rank(self) -> list[list[Piece]]:
        return [[p for tensor in self._tensors_of(rank) for p in tensor.pieces] for rank in range(self._sizes.world)]

    def _tensors_of(self, rank: int) -> list[LocalTensor]:
        return list(local_tensors(self._architecture, self._dims, self._sizes, rank))

    def _in_hf_names(self, tensors: dict[str, torch.Tensor]) -> dict[str, HeldTensor]:
        """`tensors` are some or all of this rank's."""
        there = [tensor for tensor in self._tensors if tensor.name in tensors]
        return held_tensors(self._architecture, self._dims, there, tensors, self._dtypes)

    def _micro_batches(self, data: DataProto, limits: MicroBatchLimits) -> list[list[int]]:
        """Index groups of `data`, equally many on every rank: experts are shared by ranks with different sequences."""
        groups_of_rows = partition(sequence_widths(data), limits)
        return split_to_count(groups_of_rows, largest_count(len(groups_of_rows)))

    def _built(self) -> torch.nn.Module:
        if self.model is None:
            raise RuntimeError("build() has not been called")
        return self.model


def _in_checkpoint(tensors: dict[str, HeldTensor]) -> dict[str, HeldInCheckpoint]:
    return {name: HeldInCheckpoint(tensor) for name, tensor in tensors.items() if tensor.parts}
