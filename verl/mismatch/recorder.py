"""Copies of what modules of an engine's model get and return, token by token.

An engine's process makes a recorder, calls `hook_modules`, and `begin` before each call of the model. Responses may be
given: the engine then samples their tokens, whatever the distribution, and everything else is as in service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from verl.mismatch.places import (
    ATTENTION,
    IDS,
    LOG_PROBS,
    LOGITS,
    POSITIONS,
    SUM,
    entered,
    modules_of,
    states_in,
    states_out,
    tokens_first,
)

Step = dict[str, Any]
"""`rows`: (sequence, index) of each token; `last`: scores with the rows that they follow; the rest by place."""


def request_id(sequence: int) -> str:
    return f"s{sequence}"


def sequence_of(request: str) -> int:
    """The number of the sequence of a request. vLLM appends characters of its own to the id that it is given."""
    return int(request.split("-")[0].removeprefix("s"))


class Recorder:
    """What one rank's model computes, from the first `begin` to `close`."""

    def __init__(self, model: nn.Module, sequences: Sequence[Sequence[int]]) -> None:
        """`sequences`: token ids of prompt and response by number; what a prompt alone is there for is sampled."""
        self.steps: list[Step] = []
        self._model = model
        self._sequences = sequences
        self._undo: list[Callable[[], None]] = []

    def hook_modules(self, names: Sequence[str], attentions: Iterable[tuple[str, nn.Module]]) -> list[str]:
        """Record at the modules that have `names`; returns the names of those that exist.

        `attentions`: attention kernels with their paths in the model.
        """
        modules = modules_of(self._model)
        found = [name for name in names if name in modules]
        for name in found:
            module = modules[name]
            self._add(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            self._add(module.register_forward_hook(self._leaving(name), with_kwargs=True))
        for name, module in attentions:
            place = name[name.find("layers.") :].rpartition(".")[0]
            self._add(module.register_forward_pre_hook(self._attending(place), with_kwargs=True))
            self._add(module.register_forward_hook(self._attended(place)))
        return found

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()

    def begin(self, rows: list[tuple[int, int]], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """The model is called with these arguments. `rows`: sequence and index of each token that it computes."""
        self.steps.append({"rows": rows, "last": {}})
        given = dict(zip(("input_ids", "positions"), arguments, strict=False)) | options
        for name in (IDS, POSITIONS):
            if isinstance(given.get(name), torch.Tensor):
                self._keep(name, given[name].flatten() if given[name].dim() == 1 else given[name][0])

    def scores(self, logits: torch.Tensor) -> None:
        """Keep [rows of `last()`, vocabulary]: what the head returned."""
        if self.steps:
            self.steps[-1]["last"][LOGITS] = logits.detach().to("cpu", copy=True)
            self.steps[-1]["last"]["rows"] = self.last()

    def sampled(self, tokens: torch.Tensor, log_probs: torch.Tensor | None) -> None:
        """Keep the distributions, [rows, vocabulary], and write into `tokens` those that are given."""
        if not self.steps:
            return
        if log_probs is not None:
            self.steps[-1]["last"][LOG_PROBS] = log_probs.detach().float().to("cpu", copy=True)
        for row, (sequence, index) in enumerate(self.last()):
            known = self._sequences[sequence]
            if index + 1 < len(known):
                tokens[row] = known[index + 1]

    def last(self) -> list[tuple[int, int]]:
        """(sequence, index) of each request's last token in the step, in the order of the rows of its scores."""
        return list(dict(self.steps[-1]["rows"]).items())

    def states_before(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> list[torch.Tensor]:
        """What the module `name` gets: hidden states, or what is added to a sum and the sum."""
        return states_in(arguments, options)

    def states_after(
        self, name: str, arguments: tuple[Any, ...], options: dict[str, Any], returned: Any
    ) -> list[torch.Tensor]:
        """The same of what it returned."""
        return states_out(returned)

    def _add(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        before = vars(owner).get(name)
        object.__setattr__(owner, name, function)
        if before is None:
            self._undo.append(lambda: object.__delattr__(owner, name))
        else:
            self._undo.append(lambda: object.__setattr__(owner, name, before))

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        """A copy of the rows of the step's tokens: kernels of engines write into what they got."""
        step = self.steps[-1]
        count = len(step["rows"])
        rows = tokens_first(tensor.detach(), count)
        rows = rows if len(rows) >= count and rows.dim() < 4 else rows[0]
        if len(rows) >= count:  # else tokens are not its rows, and it cannot be compared
            step[name] = (rows if rows.dim() == 1 else rows.flatten(1))[:count].to("cpu", copy=True)

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            for suffix, states in zip(("", SUM), self.states_before(name, arguments, options), strict=False):
                self._keep(f">{name}{suffix}", states)
                if (also := entered(name)) is not None:
                    self._keep(f"{also}{suffix}", states)

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: Any, arguments: tuple[Any, ...], options: dict[str, Any], returned: Any) -> None:
            after = self.states_after(name, arguments, options, returned)
            for suffix, states in zip(("", SUM), after, strict=False):
                self._keep(f"{name}{suffix}", states)

        return leave

    def _attending(self, place: str) -> Callable[..., None]:
        def attend(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            given = dict(zip(ATTENTION, arguments, strict=False)) | options
            for name in ATTENTION[:3]:
                if isinstance(given.get(name), torch.Tensor):
                    self._keep(f"{place}.{name}", given[name].reshape(given[name].shape[0], -1))

        return attend

    def _attended(self, place: str) -> Callable[..., None]:
        def leave(module: Any, arguments: tuple[Any, ...], returned: torch.Tensor) -> None:
            self._keep(f"{place}.{ATTENTION[3]}", returned.reshape(returned.shape[0], -1))

        return leave
