"""One rank of a real training engine: a weight source, and the vanilla way to send what the engine holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from benchmarks.peers import TIMEOUT
from benchmarks.raw import broadcast, group_of_two
from verl.checkpoint_engine.plan.types import Shard, TensorSpec
from verl.protocol import DataProto
from verl.utils.model import load_hf_config
from verl.workers.config import FSDPConfig, HFModelConfig, MegatronConfig
from verl.workers.engine.megatron.architectures import architecture_of
from verl.workers.engine.megatron.checks import sizes_of
from verl.workers.engine.megatron.export import TensorCollector
from verl.workers.engine.megatron.held import held_tensors
from verl.workers.engine.megatron.layout import Dimensions, local_tensors
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.engine.registry import new_engine

RANKS = 2
DTYPE = torch.bfloat16
"""What the trainer holds and what the rollout gets."""
STEP = 2.0**-7
TOKENS = 32
"""Of the forward pass that a trainer makes after a sync has begun: next to nothing."""
MEGATRON = MegatronConfig(tensor_model_parallel_size=RANKS, model_dtype="bf16")

Wholes = Callable[[], Iterator[torch.Tensor]]
"""A collective that gathers one tensor after the other."""


class EngineRank:
    """Rank `rank` of an engine without an optimizer. Made on all ranks at once, each in a process of its own.

    A source: it hands on what the engine's own source says.
    """

    def __init__(self, strategy: str, model: Path, rank: int, port: int) -> None:
        self._store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
        dist.init_process_group(
            "gloo", store=PrefixStore("ranks", self._store), rank=rank, world_size=RANKS, timeout=TIMEOUT
        )
        self._rank = rank
        self._model_config = HFModelConfig(path=str(model))
        engine: Any = new_engine(
            strategy, fsdp=FSDPConfig(model_dtype="bf16"), megatron=MEGATRON, model_config=self._model_config
        )
        engine.build()
        self._engine, self._model = engine, engine.model
        self._tokens = _tokens(TOKENS)
        self._source = engine.weight_source("bfloat16")
        self._names = sorted(spec.name for spec in self._source.specs())
        self._wholes = _GATHERED[strategy](self)

    def specs(self) -> Sequence[TensorSpec]:
        specs: Sequence[TensorSpec] = self._source.specs()
        return specs

    def shards(self) -> Sequence[Shard]:
        shards: Sequence[Shard] = self._source.shards()
        return shards

    def view(self, shard: Shard) -> torch.Tensor | None:
        values: torch.Tensor | None = self._source.view(shard)
        return values

    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        self._source.copy(shard, destination)

    def compute_log_prob(self) -> float:
        """A forward pass on `TOKENS` tokens, with what it gathers. A collective; the seconds that it took."""
        dist.barrier()
        start_s = time.perf_counter()
        self._engine.compute_log_prob(self._tokens, temperature=1.0, limits=MicroBatchLimits(max_sequences=1))
        return time.perf_counter() - start_s

    @torch.no_grad()
    def step(self) -> None:
        """Change the weights, where they are: by the same on all ranks, of which some hold the same."""
        for parameter in self._model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.add_(STEP)

    def meet_receiver(self) -> None:
        """Rank 0 and the receiver get a group of their own."""
        if self._rank == 0:
            self._receiver = group_of_two(PrefixStore("receiver", self._store), 0)

    @torch.no_grad()
    def broadcast(self) -> float:
        """Gather tensor after tensor, in the order of their names, and send each from rank 0. The seconds that it took.

        A collective of all ranks; the receiver takes what comes meanwhile.
        """
        dist.barrier()
        start_s = time.perf_counter()
        for whole in self._wholes():
            if self._rank == 0:
                broadcast(self._receiver, whole.to(DTYPE).contiguous()).wait()
        return time.perf_counter() - start_s

    # ---- what each engine has for gathering: whole tensors in the order of `_names`, at least on rank 0

    def _summoned(self) -> Wholes:
        def wholes() -> Iterator[torch.Tensor]:
            with FullyShardedDataParallel.summon_full_params(self._model, writeback=False, rank0_only=True):
                parameters = dict(self._model.named_parameters())
                yield from (parameters[name] for name in self._names if self._rank == 0)

        return wholes

    def _full_tensors(self) -> Wholes:
        parameters = dict(self._model.named_parameters())
        return lambda: (parameters[name].full_tensor() for name in self._names)

    def _collected(self) -> Wholes:
        """As an export does."""
        config = load_hf_config(self._model_config)
        architecture, sizes = architecture_of(config.model_type), sizes_of(MEGATRON, RANKS)
        dims = Dimensions.of(config, padded_vocab=MEGATRON.padded_vocab(config.vocab_size))
        pieces = [
            [piece for tensor in local_tensors(architecture, dims, sizes, rank) for piece in tensor.pieces]
            for rank in range(RANKS)
        ]
        own = list(local_tensors(architecture, dims, sizes, self._rank))
        parameters = dict(self._model.named_parameters())
        held = held_tensors(architecture, dims, own, parameters, dict.fromkeys((False, True), DTYPE))
        collector = TensorCollector(pieces, held, dtypes=dict.fromkeys(held, DTYPE))
        return lambda: (whole for name in self._names for whole in collector.collect(name).values())


def _tokens(count: int) -> DataProto:
    """One sequence of `count` tokens, of which the second half is the response."""
    ids, mask = torch.arange(1, count + 1).unsqueeze(0), torch.ones(1, count, dtype=torch.long)
    half = count // 2
    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :half],
            "responses": ids[:, half:],
            "response_mask": mask[:, half:],
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": torch.arange(count).unsqueeze(0),
        }
    )


_GATHERED = {"fsdp": EngineRank._summoned, "fsdp2": EngineRank._full_tensors, "megatron": EngineRank._collected}
STRATEGIES = tuple(_GATHERED)
