"""Build a rank's part of a model in Megatron from the model's directory: layout, module and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.workers.config import HFModelConfig
from verl.workers.config.megatron import MegatronConfig
from verl.workers.engine.adapters import initialize
from verl.workers.engine.filling import Filled, fill, require_equal
from verl.workers.engine.fsdp.mesh import DTYPES
from verl.workers.engine.megatron import cpu, groups
from verl.workers.engine.megatron.adapted import with_adapters
from verl.workers.engine.megatron.architectures import EMBEDDING_NAME, TIED_NAME, Architecture, architecture_of
from verl.workers.engine.megatron.checks import check, sizes_of
from verl.workers.engine.megatron.dist_checkpoint import load_weights
from verl.workers.engine.megatron.held import held_tensors
from verl.workers.engine.megatron.layout import Dimensions, LocalTensor, ParallelSizes, Piece, local_tensors
from verl.workers.engine.megatron.library import model_parallel_cuda_manual_seed
from verl.workers.engine.megatron.lora import attach, keep_gradients, merged
from verl.workers.engine.megatron.model import make_model, require_same_tensors
from verl.workers.engine.megatron.optimizer import Weights
from verl.workers.engine.tensors import HeldTensor
from verl.workers.hf.checkpoint import HFCheckpoint
from verl.workers.hf.precision import names_kept_wide, require_precision


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ranks divide the tensors of a model."""

    architecture: Architecture
    dims: Dimensions
    sizes: ParallelSizes
    adapters: Mapping[str, tuple[int, ...]]
    """The shapes of all adapters, in the order of Hugging Face's model."""

    @cached_property
    def own(self) -> list[LocalTensor]:
        """The local tensors of this rank."""
        return self.tensors_of(dist.get_rank())

    def tensors_of(self, rank: int) -> list[LocalTensor]:
        return list(local_tensors(self.architecture, self.dims, self.sizes, rank))

    def pieces_by_rank(self) -> list[list[Piece]]:
        return [[p for tensor in self.tensors_of(rank) for p in tensor.pieces] for rank in range(self.sizes.world)]

    @property
    def stage(self) -> range:
        """The layers of this rank's pipeline stage."""
        stages = self.sizes.stages(self.dims.layers)
        assert stages is not None  # checked before any process started
        return stages[self.sizes.of(dist.get_rank()).pipeline]


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A rank's part of a model."""

    module: torch.nn.Module
    layout: Layout
    trained: list[LocalTensor]
    """The tensors of `layout.own` that an optimizer changes."""
    weights: Weights
    dtypes: Mapping[bool, torch.dtype]
    """The dtypes of adapters (true) and of other tensors (false)."""
    held: dict[str, HeldTensor]
    """`weights` under Hugging Face's names."""
    kept_wide: frozenset[str]
    """Names in `held` that are sent wider than the rest."""
    scale: float
    """The factor of an adapter's product."""

    @property
    def checkpointed(self) -> dict[str, HeldTensor]:
        """The tensors of checkpoints. With adapters the base is not among them: it is in the model's directory."""
        return {name: self.held[name] for name in self.layout.adapters} or self.held

    def merged(self) -> dict[str, HeldTensor]:
        """`held`, with adapters merged into their weights."""
        return merged(self.held, self.scale)

    def in_hf_names(self, tensors: dict[str, torch.Tensor]) -> dict[str, HeldTensor]:
        """`tensors` are some or all of this rank's."""
        there = [tensor for tensor in self.layout.own if tensor.name in tensors]
        return held_tensors(self.layout.architecture, self.layout.dims, there, tensors, self.dtypes)


@dataclass(frozen=True, kw_only=True)
class Builder:
    """Builds one model. The process group must exist."""

    model_config: HFModelConfig
    config: MegatronConfig
    hf_config: Any
    device: torch.device
    seed: int
    labels: int
    """As in `Dimensions`."""
    is_trained: bool
    """Otherwise it is frozen (a reference policy)."""

    def build(self) -> tuple[BuiltModel, Filled | None]:
        """Build the model. Also returns what it read of its directory; None if it loaded another checkpoint instead.

        Raises ConfigError for a model and layout that do not fit each other. A collective.
        """
        if self.device.type == "cpu":
            cpu.adapt()
        architecture, adapters = self._architecture()
        with HFCheckpoint(Path(self.model_config.path)) as checkpoint:
            layout = self._layout(architecture, adapters, checkpoint)
            self._join(layout)
            built = self._held(layout, self._module(layout), checkpoint)
            filled = self._fill(built, checkpoint)
        if other := self._first_weights():
            own = built.weights.tensors
            base = {tensor.name: own[tensor.name] for tensor in built.layout.own if not tensor.row.is_adapter}
            load_weights(built.module, base, other, self.config.dist_checkpointing_prefix)
        built.weights.publish()
        return built, None if other else filled

    def _architecture(self) -> tuple[Architecture, Mapping[str, tuple[int, ...]]]:
        """And the shapes of adapters, which are trained in the place of the rest."""
        architecture = architecture_of(self.hf_config.model_type)
        if self.is_trained and self.model_config.lora_rank:
            return with_adapters(self.model_config, self.hf_config)
        return architecture, {}

    def _layout(
        self, architecture: Architecture, adapters: Mapping[str, tuple[int, ...]], checkpoint: HFCheckpoint
    ) -> Layout:
        check(
            self.config,
            self.hf_config,
            world=dist.get_world_size(),
            device=self.device.type,
            checkpoint=checkpoint,
            labels=self.labels,
            dropout=self.model_config.dropout,
        )
        dims = Dimensions.of(
            self.hf_config,
            padded_vocab=self.config.padded_vocab(self.hf_config.vocab_size),
            labels=self.labels,
            rank=self.model_config.lora_rank,
        )
        sizes = sizes_of(self.config, dist.get_world_size())
        return Layout(architecture=architecture, dims=dims, sizes=sizes, adapters=adapters)

    def _join(self, layout: Layout) -> None:
        groups.join(layout.sizes)
        if self.device.type != "cpu":
            model_parallel_cuda_manual_seed(self.seed)

    def _module(self, layout: Layout) -> torch.nn.Module:
        """With all weights 0."""
        recompute = self.is_trained and (
            self.model_config.enable_gradient_checkpointing
            or self.config.override_transformer_config.get("recompute_granularity") is not None
        )
        module = make_model(
            self.hf_config,
            self.config,
            architecture=layout.architecture,
            dims=layout.dims,
            sizes=layout.sizes,
            device=self.device,
            recompute=recompute,
            drops=self.model_config.drops,
        )
        if layout.adapters:
            attach(module, layout.own, layout.dims, layout.sizes, scale=self._scale)
            if recompute:
                keep_gradients(module)
        require_same_tensors(module, layout.own)
        return module

    def _held(self, layout: Layout, module: torch.nn.Module, checkpoint: HFCheckpoint) -> BuiltModel:
        """With copies of the weights, where they are kept in another dtype than the module's."""
        dtypes = self._dtypes(layout, checkpoint)
        trained = [
            tensor for tensor in layout.own if self.is_trained and tensor.row.is_adapter == bool(layout.adapters)
        ]
        weights = Weights(
            module,
            {tensor.name: dtypes[tensor.row.is_adapter] for tensor in layout.own},
            trained=[tensor.name for tensor in trained],
        )
        held = held_tensors(layout.architecture, layout.dims, layout.own, weights.tensors, dtypes)
        if self.is_trained:
            require_precision(held.keys() & checkpoint.names, checkpoint, dtypes[False])
        return BuiltModel(
            module=module,
            layout=layout,
            trained=trained,
            weights=weights,
            dtypes=dtypes,
            held=held,
            kept_wide=names_kept_wide({name: tensor.shape for name, tensor in held.items()}, checkpoint),
            scale=self._scale,
        )

    def _dtypes(self, layout: Layout, checkpoint: HFCheckpoint) -> dict[bool, torch.dtype]:
        """As in `BuiltModel`. What is not trained needs nothing beside the model's own, unless that rounds what is
        exported."""
        computed, kept = DTYPES[self.config.dtype], DTYPES[self.config.model_dtype]
        if not self.is_trained:
            return {True: computed, False: computed}
        in_files = {checkpoint.dtype(name) for name in checkpoint.names}
        return {True: kept, False: computed if layout.adapters and in_files == {computed} else kept}

    def _fill(self, built: BuiltModel, checkpoint: HFCheckpoint) -> Filled:
        """Give it the values of the checkpoint, and to adapters those that they begin with."""
        held = built.held
        filled = fill(held, checkpoint, zero=held.keys() - checkpoint.names)  # a new head is 0
        initialize({name: held[name] for name in built.layout.adapters}, self.seed)
        if built.layout.dims.tied and TIED_NAME in checkpoint.names and EMBEDDING_NAME in held:
            require_equal(EMBEDDING_NAME, TIED_NAME, held[EMBEDDING_NAME], checkpoint)
        return filled

    def _first_weights(self) -> Path | None:
        """The distributed checkpoint from which they come instead. Those of a critic do not."""
        path = self.config.dist_checkpointing_path
        return Path(path).expanduser() if self.config.use_dist_checkpointing and path and not self.labels else None

    @property
    def _scale(self) -> float:
        return self.model_config.lora_alpha / (self.model_config.lora_rank or 1)
