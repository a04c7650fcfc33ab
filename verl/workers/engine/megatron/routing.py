"""Router replay: a token's experts are chosen once per step, not again in every pass.

Otherwise passes may choose differently between experts with nearly equal scores, and the log-probs of a step differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from verl.workers.engine.base import UNKNOWN_EXPERT
from verl.workers.engine.megatron import groups
from verl.workers.engine.megatron.forward import PackedBatch

Choice = tuple[torch.Tensor, torch.Tensor]


class LayerRoutes:
    """The experts of one of Megatron's routers, with the interface of Megatron's own `RouterReplay`."""

    def __init__(self) -> None:
        self.given: torch.Tensor | None = None
        """The experts [tokens, k] for the forward pass that is under way; None: there is none, or it is free."""
        self.chosen: torch.Tensor | None = None
        """Those of the last pass."""
        self._passes: deque[torch.Tensor] = deque()
        """Those of forward passes whose backward pass is to come, in which a layer may be computed again."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Choice] | None = None,
    ) -> Choice:
        """(scores, experts), both [tokens, topk]. Megatron calls it, with these names."""
        assert default_compute_topk is not None
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given = self.given
        if given is None and self._passes:  # micro-batches go back in the order in which they came
            given = self._passes.popleft()
        if given is not None:
            chosen = torch.where(given == UNKNOWN_EXPERT, chosen, given.to(chosen.dtype))
            values = scores.gather(1, chosen)
        self.chosen = chosen
        return values, chosen

    def end_pass(self) -> None:
        if self.given is not None and torch.is_grad_enabled():
            self._passes.append(self.given)
        self.given = None

    def forget(self) -> None:
        self._passes.clear()
        self.given = self.chosen = None


class RouterReplay:
    """The routers of one stage. Routes of a batch are integers [b, P+R, layers of the model, k]."""

    def __init__(self, model: Any, *, stage: range, num_layers: int, sequence_parallel: bool) -> None:
        """`stage`: the model's layers, every one with experts, that `model` has."""
        self._layers: dict[int, LayerRoutes] = {}
        for number, layer in zip(stage, model.decoder.layers, strict=True):
            routes = layer.mlp.router.router_replay = LayerRoutes()
            self._layers[number] = routes
        self._num_layers = num_layers
        self._shared_by = groups.sharing_a_loss() if sequence_parallel else None
        """Ranks each of which routes a part of the tokens."""
        self._records = False
        self._recorded: list[torch.Tensor] = []

    def begin(self, *, records: bool) -> None:
        """Begin a call of several micro-batches. `records`: keep their routes for `recorded`."""
        self._records, self._recorded = records, []
        for layer in self._layers.values():
            layer.forget()

    @contextmanager
    def forward_pass(self, packed: PackedBatch, routes: torch.Tensor | None) -> Iterator[None]:
        """The forward pass of a micro-batch, along `routes`; a collective if it is recorded."""
        for number, layer in self._layers.items():
            layer.given = None if routes is None else self._of_tokens(packed, routes[:, :, number])
        yield
        if self._records:
            self._recorded.append(self._of_columns(packed))
        for layer in self._layers.values():
            layer.end_pass()

    def recorded(self, micro_batches: list[list[int]], num_rows: int, num_columns: int) -> torch.Tensor:
        """int16 [rows, columns, layers, k] of all stages; `UNKNOWN_EXPERT` on padding. A collective of the pipeline."""
        width = max((found.shape[-1] for found in self._recorded), default=0)
        width = int(groups.largest_of_stages(torch.tensor(width)))
        found = torch.zeros(num_rows, num_columns, self._num_layers, width, dtype=torch.int32)
        for rows, part in zip(micro_batches, self._recorded, strict=True):
            for place, number in enumerate(self._layers):
                found[rows, :, number] = part[:, :, place] + 1
        return (groups.sum_of_stages(found) - 1).to(torch.int16)

    def _of_tokens(self, packed: PackedBatch, routes: torch.Tensor) -> torch.Tensor:
        """[tokens, k] in Megatron's order, which is by column and then by sequence, from [b, P+R, k]."""
        columns = packed.columns
        rows = torch.arange(len(columns), device=columns.device).unsqueeze(-1)
        found = routes.to(torch.int64)[rows, columns.clamp(min=0)]
        found = found.masked_fill((columns < 0).unsqueeze(-1), UNKNOWN_EXPERT).transpose(0, 1)
        if self._shared_by is not None:
            found = found.chunk(dist.get_world_size(self._shared_by))[dist.get_rank(self._shared_by)]
        return found.reshape(-1, found.shape[-1])

    def _of_columns(self, packed: PackedBatch) -> torch.Tensor:
        """The inverse of `_of_tokens`, for all layers of the stage: int32 [b, P+R, layers, k] on the CPU."""
        num_sequences, num_tokens = packed.columns.shape
        layers = []
        for layer in self._layers.values():
            assert layer.chosen is not None  # the pass is over
            chosen = layer.chosen
            if self._shared_by is not None:
                parts = [torch.empty_like(chosen) for _ in range(dist.get_world_size(self._shared_by))]
                dist.all_gather(parts, chosen.contiguous(), group=self._shared_by)
                chosen = torch.cat(parts)
            layers.append(chosen.view(num_tokens, num_sequences, -1).transpose(0, 1))
        if not layers:
            return torch.zeros(num_sequences, 0, 0, 0, dtype=torch.int32)
        chosen = torch.stack(layers, dim=2).to("cpu", torch.int32)
        columns = packed.columns.cpu()
        rows, places = (columns >= 0).nonzero(as_tuple=True)
        found = torch.full((num_sequences, packed.num_columns, *chosen.shape[2:]), UNKNOWN_EXPERT, dtype=torch.int32)
        found[rows, columns[rows, places]] = chosen[rows, places]
        return found
