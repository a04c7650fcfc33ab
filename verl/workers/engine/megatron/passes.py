"""Forward and backward passes of a Megatron model over the micro-batches of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from verl.protocol import DataProto, tensors_of
from verl.workers.engine.base import ROUTES
from verl.workers.engine.megatron import groups, library
from verl.workers.engine.megatron.forward import PackedBatch
from verl.workers.engine.megatron.library import parallel_state, schedules
from verl.workers.engine.megatron.routing import RouterReplay
from verl.workers.engine.micro_batches import partition, sequence_widths, split_to_count
from verl.workers.engine.totals import largest_count, sum_over_ranks, sums_of

if TYPE_CHECKING:
    from verl.workers.engine.micro_batches import MicroBatchLimits

Compute = Callable[[torch.Tensor, torch.Tensor, DataProto], tuple[torch.Tensor, Any]]
"""(log-probs, entropies, micro-batch) -> the loss, and the result for the micro-batch."""
OfResponses = Callable[[torch.Tensor, PackedBatch, DataProto, float], tuple[torch.Tensor, torch.Tensor]]
"""(outputs of the last stage, their tokens, micro-batch, temperature) -> log-probs and entropies, float32 [b, R]."""


class Passes:
    """The passes of one model. Every method is a collective."""

    def __init__(
        self,
        model: torch.nn.Module,
        of_responses: OfResponses,
        *,
        device: torch.device,
        multiple: int,
        replay: RouterReplay | None,
    ) -> None:
        """`multiple`: that of `PackedBatch.of`. `replay`: the router replay that gives tokens their experts."""
        self._model, self._of_responses = model, of_responses
        self._device, self._multiple, self._replay = device, multiple, replay

    @library.quiet()
    def run(
        self,
        micro_batches: list[DataProto],
        compute: Compute,
        *,
        temperature: float,
        forward_only: bool,
        records: bool = False,
    ) -> list[Any]:
        """Run Megatron's schedule over `micro_batches`; return `compute`'s result for each on the last stage."""
        if self._replay is not None:
            self._replay.begin(records=records)

        def forward(batches: Iterator[DataProto], model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
            micro_batch = next(batches).to(self._device)
            packed = PackedBatch.of(micro_batch, multiple=self._multiple)

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
            model=self._model,
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


def micro_batches_of(data: DataProto, limits: MicroBatchLimits) -> list[list[int]]:
    """Index groups of `data`, the same number on every rank, because ranks with different sequences share experts."""
    groups_of_rows = partition(sequence_widths(data), limits)
    return split_to_count(groups_of_rows, largest_count(len(groups_of_rows)))


def metrics_of(shares: list[dict[str, Any]]) -> dict[str, float]:
    """Sum the metrics of `shares`, the last stage's, over micro-batches and data-parallel ranks; on all ranks."""
    sums = sums_of(shares)
    if not parallel_state.is_pipeline_last_stage():
        return groups.record_from_last_stage(None)
    return groups.record_from_last_stage(sum_over_ranks(sums, parallel_state.get_data_parallel_group()))
