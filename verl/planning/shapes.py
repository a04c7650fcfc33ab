"""Derives from a model's config its tensors, and the boxes of them that each trainer rank would hold.

The model is built on the meta device, without memory. Names and shapes of its checkpoint are those that transformers
would save; a rank's boxes follow from the rules with which the trainer loads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from verl.checkpoint_engine.errors import PlanError
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.types import Shard, TensorSpec
from verl.planning.alike import NotAlike, Thinned
from verl.planning.job import Job
from verl.utils.config import ConfigError
from verl.workers.config.megatron import MegatronConfig
from verl.workers.hf.conversion import Conversion

MASTER_DTYPE = "float32"
"""The dtype in which a trainer holds weights by default, and of tensors that engines get unchanged."""
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    name: str
    layout: Layout
    held: list[ShardTable]
    """The boxes of each trainer rank."""
    held_numel: npt.NDArray[np.int64]
    """The number of parameters of each trainer rank, without the padding of a vocabulary."""
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        return sum(spec.numel for spec in self.layout.specs)


def planned_model(path: Path, job: Job) -> PlannedModel:
    """The model in `path`, a model directory or a `config.json`. Raises ConfigError, PlanError."""
    config, notes = _config(path)
    layout, held = _megatron(config, job) if job.strategy == "megatron" else _fully_sharded(config, job)
    numel = np.array([int(np.prod(table.stop - table.start, axis=1, dtype=np.int64).sum()) for table in held])
    name = f"{config.model_type}, {config.get_text_config().num_hidden_layers} layers"
    return PlannedModel(name=name, layout=layout, held=held, held_numel=numel, notes=notes)


def _config(path: Path) -> tuple[Any, tuple[str, ...]]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path} is neither a model directory with a config.json nor such a file")
    try:
        fields = json.loads(file.read_text("utf-8"))
    except (ValueError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{file} is no JSON: {exc}") from exc
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ConfigError(f"{file} is not the config of a model: it has no model_type")
    quantized = fields.pop("quantization_config", None) is not None
    note = "its quantization_config is left out: a job trains and sends a dequantised copy"
    from transformers import CONFIG_MAPPING

    kind = fields["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"{file}: transformers has no model_type={kind!r}, and code that comes with a model is not run for a plan"
        )
    try:
        return CONFIG_MAPPING[kind].from_dict(fields), (note,) if quantized else ()
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise ConfigError(f"{file}: transformers refuses it: {exc}") from exc


# ---- fsdp2


def _fully_sharded(config: Any, job: Job) -> tuple[Layout, list[ShardTable]]:
    model, conversion, names = _thinned(config)
    few = Layout.of(list(_specs(model, conversion, job.dtype)))
    like = [few.index[name] for name in names.values()]
    specs = (few.specs[row] for row in like)
    layout = Layout.of(
        [TensorSpec(name=name, shape=spec.shape, dtype=spec.dtype) for name, spec in zip(names, specs, strict=True)]
    )
    buffers = {name for name, _ in model.named_buffers()}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    pieces = _Pieces.of(few, conversion, shapes, buffers).repeated(np.array(like))
    parts = job.trainers.ranks if job.fsdp_size == -1 else job.fsdp_size
    distinct = pieces.dealt_out(layout, parts)
    return layout, [distinct[rank % parts] for rank in range(job.trainers.ranks)]


def _thinned(config: Any) -> tuple[Any, Conversion, dict[str, str]]:
    """A model that lacks layers like others, its checkpoint, and the whole one: each tensor, and the one it is like."""
    model = _model_of(config)
    try:
        thinned = Thinned.of(model)
        conversion = _conversion_of(model)
        return model, conversion, thinned.names(conversion)
    except (NotAlike, PlanError):  # the whole model takes longer, or has an error that names all of its tensors
        model, conversion = _whole(config)
        return model, conversion, {name: name for name in conversion.shapes}


def _whole(config: Any) -> tuple[Any, Conversion]:
    model = _model_of(config)
    return model, _conversion_of(model)


def _model_of(config: Any) -> Any:
    """The model without memory."""
    import torch

    from verl.utils.language_model import auto_class

    try:
        with torch.device("meta"):
            return auto_class(config).from_config(config, dtype=torch.float32)
    except (ValueError, ImportError, AttributeError, TypeError) as exc:
        why = str(exc).strip().splitlines()[0]  # names of all other classes follow
        raise ConfigError(f"transformers cannot build a causal language model of {config.model_type}: {why}") from exc


def _conversion_of(model: Any) -> Conversion:
    """The model's checkpoint as transformers would write and read it."""
    from transformers.core_model_loading import revert_weight_conversion

    from verl.workers.hf.conversion import conversion_of, first_names
    from verl.workers.hf.rearranged import Rearranged

    again = first_names(model)
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in again}
    symbolic: Any = {name: Rearranged.of(name, shape) for name, shape in own.items()}
    try:
        saved: dict[str, Any] = revert_weight_conversion(model, symbolic)
    except (ValueError, IndexError, KeyError, AttributeError, RuntimeError) as exc:
        kind = model.config.model_type
        raise PlanError(f"the tensors of {kind} do not follow from its config: {exc}") from exc
    conversion = conversion_of(model, {name: tuple(tensor.shape) for name, tensor in saved.items()})
    conversion.require_whole()
    return conversion


def _specs(model: Any, conversion: Conversion, dtype: str) -> Iterator[TensorSpec]:
    """As `FSDPWeightSource` sends them."""
    from verl.workers.hf.precision import names_kept_by_transformers, names_kept_wide

    unknown: Any = SimpleNamespace(names=(), common_dtype=lambda: None)
    wide = names_kept_wide(conversion.shapes, unknown) | names_kept_by_transformers(model, conversion)
    buffers = {name: str(buffer.dtype).removeprefix("torch.") for name, buffer in model.named_buffers()}
    for name, shape in conversion.shapes.items():
        target, _ = next(conversion.parts_of(name))
        held = buffers.get(target, MASTER_DTYPE)
        as_held = target in buffers or name in wide
        yield TensorSpec(name=name, shape=shape, dtype=held if as_held else dtype)


@dataclass(frozen=True)
class _Pieces:
    """What tensors of a checkpoint are in the model, as columns. FSDP2 cuts the model's tensors by their rows."""

    tensor: npt.NDArray[np.int64]
    low: npt.NDArray[np.int64]
    high: npt.NDArray[np.int64]
    """First and last row of the model's tensor."""
    rows_of_target: npt.NDArray[np.int64]
    is_whole: npt.NDArray[np.bool_]
    """Every rank has all of it: a buffer, or a scalar."""
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    along: npt.NDArray[np.int64]
    """Which dimension of the checkpoint's tensor runs along the rows; -1: none."""

    @classmethod
    def of(
        cls, layout: Layout, conversion: Conversion, shapes: dict[str, tuple[int, ...]], buffers: set[str]
    ) -> _Pieces:
        width = layout.shapes.shape[1]
        rows = []
        for target, pieces in conversion.pieces.items():
            shape, whole = shapes[target], target in buffers or not shapes[target]
            for piece in pieces:
                box = piece.origin_box
                pad = width - len(box.start)
                rows.append(
                    (
                        layout.index[piece.origin],
                        *((piece.box.start[0], piece.box.stop[0], shape[0]) if shape else (0, 1, 1)),
                        whole,
                        piece.dims.index(0) if 0 in piece.dims else -1,
                        *(*box.start, *(0,) * pad),
                        *(*box.stop, *(1,) * pad),
                    )
                )
        table = np.array(sorted(rows), np.int64).reshape(len(rows), 6 + 2 * width)
        tensor, low, high, of_target, whole, along = table[:, :6].T
        return cls(
            tensor, low, high, of_target, whole.astype(bool), table[:, 6 : 6 + width], table[:, 6 + width :], along
        )

    def repeated(self, like: npt.NDArray[np.int64]) -> _Pieces:
        """The pieces of other tensors: tensor i has those that `like[i]` has here."""
        bounds = np.searchsorted(self.tensor, np.stack([like, like + 1]))
        tensor, rows = _ranges(*bounds)
        return _Pieces(tensor, *(getattr(self, field.name)[rows] for field in fields(self)[1:]))

    def dealt_out(self, layout: Layout, parts: int) -> list[ShardTable]:
        """The boxes of each of `parts` ranks: equal chunks of rows, the last ones smaller or empty."""
        chunk = np.maximum(-(-self.rows_of_target // parts), 1)
        some = self.low < self.high
        first = np.where(self.is_whole, 0, self.low // chunk)
        last = np.where(self.is_whole, parts, -(-self.high // chunk))
        piece, part = _ranges(first[some], last[some])
        piece = np.flatnonzero(some)[piece]
        order = np.argsort(part.astype(np.min_scalar_type(parts)), kind="stable")  # linear for 2-byte integers
        piece, part = piece[order], part[order]
        table = ShardTable.empty(layout, len(piece))
        table.tensor[:], table.start[:], table.stop[:] = self.tensor[piece], self.start[piece], self.stop[piece]
        cut = np.flatnonzero((self.along[piece] >= 0) & ~self.is_whole[piece])
        piece, begin, dims = piece[cut], part[cut] * chunk[piece[cut]], self.along[piece[cut]]
        low, high = np.maximum(self.low[piece], begin), np.minimum(self.high[piece], begin + chunk[piece])
        table.start[cut, dims] += low - self.low[piece]
        table.stop[cut, dims] -= self.high[piece] - high
        bounds = np.searchsorted(part, np.arange(parts + 1)).tolist()
        return [table.take(slice(low, high)) for low, high in pairwise(bounds)]


def _ranges(
    start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(i, j) for each j of each range `start[i]:stop[i]`, as columns."""
    counts = stop - start
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - start, counts)


# ---- megatron


def _megatron(config: Any, job: Job) -> tuple[Layout, list[ShardTable]]:
    from verl.workers.engine.megatron.architectures import architecture_of
    from verl.workers.engine.megatron.checks import check, sizes_of
    from verl.workers.engine.megatron.layout import Dimensions, local_tensors, tensor_shapes

    settings = MegatronConfig(
        tensor_model_parallel_size=job.tensor,
        pipeline_model_parallel_size=job.pipeline,
        expert_model_parallel_size=job.expert,
        expert_tensor_parallel_size=job.expert_tensor,
        sequence_parallel=job.tensor > 1,
    )
    architecture = architecture_of(config.model_type)
    dims = Dimensions.of(config, padded_vocab=settings.padded_vocab(config.vocab_size))
    shapes = tensor_shapes(architecture, dims)
    usual: Any = SimpleNamespace(names=shapes.keys(), shape=shapes.__getitem__)
    check(settings, config, world=job.trainers.ranks, device="cuda", checkpoint=usual)
    wide = _kept_wide(shapes)
    layout = Layout.of(
        [TensorSpec(name=n, shape=s, dtype=MASTER_DTYPE if n in wide else job.dtype) for n, s in shapes.items()]
    )
    sizes = sizes_of(settings, job.trainers.ranks)
    known: dict[tuple[int, ...], ShardTable] = {}
    tables = []
    for rank in range(sizes.world):
        place = sizes.of(rank)
        key = (place.tensor, place.pipeline, place.expert, place.expert_tensor)
        if key not in known:
            own = (piece for tensor in local_tensors(architecture, dims, sizes, rank) for piece in tensor.pieces)
            known[key] = ShardTable.of(layout, [Shard(piece.name, piece.box) for piece in own])
        tables.append(known[key])
    return layout, tables


def _kept_wide(shapes: dict[str, tuple[int, ...]]) -> Sequence[str]:
    from verl.workers.hf.precision import names_kept_wide

    unknown: Any = SimpleNamespace(names=(), common_dtype=lambda: None)
    return sorted(names_kept_wide(shapes, unknown))
