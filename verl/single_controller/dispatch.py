"""Spreads the arguments of one call on a group over its ranks, and collects the ranks' results.

Plain functions on the driver, without Ray: `register` marks a worker's method, `plan` computes every rank's arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any, TypeVar

from verl.protocol import AUTO_PADDING, DataProto, pad_dataproto_to_divisor, unpad_dataproto

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
_REGISTRATION = "__verl_registration__"


class Dispatch(Enum):
    """Which arguments the ranks get, and what the caller gets. Results are always in the order of ranks."""

    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments; a list with one result per rank."""
    RANK_ZERO = "rank_zero"
    """Only rank 0 runs, and must not wait for other ranks; the caller gets its result."""
    ALL_TO_ALL = "all_to_all"
    """Every argument is a list with one entry per rank; a list with one result per rank."""
    DP_COMPUTE = "dp_compute"
    """Lists are cut into one consecutive part per rank, lengths differing by one at most; other arguments go to all.
    Every rank returns a list; the lists are joined."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """`DataProto`s are cut into equal chunks, other arguments go to all; every rank returns a `DataProto`; these are
    concatenated. Sizes that do not divide are an error unless `meta_info['auto_padding']` is true."""
    DP_COMPUTE_METRIC = "dp_compute_metric"
    """As DP_COMPUTE_PROTO, but never padded (a repeated sample would count twice); a list with one result per rank,
    each usually a dict of metrics."""


class Execute(Enum):
    """Which ranks run a method: verl's option for `Dispatch.RANK_ZERO`."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The options of `register` for a method."""

    dispatch_mode: Dispatch
    blocking: bool


def register(
    dispatch_mode: Dispatch = Dispatch.ONE_TO_ALL, execute_mode: Execute = Execute.ALL, blocking: bool = True
) -> Callable[[AnyFunction], AnyFunction]:
    """Make a method of a `Worker` callable on its group, under its own name.

    With `blocking` the caller waits for the result; else it gets a `WorkerFuture`. A plain method runs on the rank's
    one thread, in the order of the driver's calls, the same on every rank. An `async def` method runs on the actor's
    event loop, concurrently with that thread.
    """
    if not isinstance(dispatch_mode, Dispatch):
        raise TypeError(f"register(dispatch_mode={dispatch_mode!r}): use one of {', '.join(map(str, Dispatch))}")
    if not isinstance(execute_mode, Execute):
        raise TypeError(f"register(execute_mode={execute_mode!r}): use one of {', '.join(map(str, Execute))}")
    if execute_mode is Execute.RANK_ZERO:
        if dispatch_mode not in (Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO):
            raise TypeError(f"register: rank 0 alone cannot get what {dispatch_mode} spreads over all ranks")
        dispatch_mode = Dispatch.RANK_ZERO

    def mark(function: AnyFunction) -> AnyFunction:
        setattr(function, _REGISTRATION, Registration(dispatch_mode=dispatch_mode, blocking=blocking))
        return function

    return mark


def registrations(cls: type) -> dict[str, Registration]:
    """The registered methods of a class and its bases. An override without `register` keeps its base's registration."""
    found: dict[str, Registration] = {}
    for base in reversed(inspect.getmro(cls)):
        for name, member in vars(base).items():
            if hasattr(member, _REGISTRATION):
                found[name] = getattr(member, _REGISTRATION)
    return found


Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`calls[rank]` are that rank's arguments; `collect` makes the caller's result from these ranks' results."""

    calls: dict[int, Call]
    collect: Callable[[list[Any]], Any]


def plan(mode: Dispatch, args: Sequence[Any], kwargs: Mapping[str, Any], *, world_size: int, label: str) -> Plan:
    """Spread the arguments over `world_size` ranks. `label` names group and method in messages.

    Raises ValueError or TypeError if the arguments do not fit the mode, naming both numbers.
    """
    everyone = range(world_size)
    if mode is Dispatch.RANK_ZERO:
        return Plan(calls={0: (tuple(args), dict(kwargs))}, collect=lambda results: results[0])
    if mode is Dispatch.ONE_TO_ALL:
        return Plan(calls={rank: (tuple(args), dict(kwargs)) for rank in everyone}, collect=list)
    if mode is Dispatch.ALL_TO_ALL:
        return Plan(
            calls=_spread(args, kwargs, world_size, lambda value: _per_rank(value, world_size, label)), collect=list
        )
    if mode is Dispatch.DP_COMPUTE:
        _common_length(args, kwargs, list | tuple, label)
        calls = _spread(args, kwargs, world_size, lambda value: _cut(value, world_size))
        return Plan(calls=calls, collect=lambda results: _join(results, label))
    size = _common_length(args, kwargs, DataProto, label)
    padding = mode is Dispatch.DP_COMPUTE_PROTO and any(
        value.meta_info.get(AUTO_PADDING) for value in chain(args, kwargs.values()) if isinstance(value, DataProto)
    )
    if not padding and size % world_size:
        hint = f"; set meta_info['{AUTO_PADDING}'] to pad" if mode is Dispatch.DP_COMPUTE_PROTO else ""
        raise ValueError(f"{label}: {size} samples do not divide over {world_size} ranks{hint}")
    calls = _spread(args, kwargs, world_size, lambda value: _chunk(value, world_size))
    if mode is Dispatch.DP_COMPUTE_METRIC:
        return Plan(calls=calls, collect=list)
    return Plan(calls=calls, collect=lambda results: _concat(results, size, -size % world_size, label))


def _spread(
    args: Sequence[Any], kwargs: Mapping[str, Any], world_size: int, cut: Callable[[Any], Sequence[Any]]
) -> dict[int, Call]:
    positional = [cut(value) for value in args]
    named = {key: cut(value) for key, value in kwargs.items()}
    return {
        rank: (tuple(parts[rank] for parts in positional), {key: parts[rank] for key, parts in named.items()})
        for rank in range(world_size)
    }


def _common_length(args: Sequence[Any], kwargs: Mapping[str, Any], kind: Any, label: str) -> int:
    """The one length of all arguments of `kind`."""
    named = {f"argument {position}": value for position, value in enumerate(args)} | dict(kwargs)
    sizes = {name: len(value) for name, value in named.items() if isinstance(value, kind)}
    if not sizes:
        raise TypeError(
            f"{label}: none of the arguments is a {getattr(kind, '__name__', kind)} to spread over the ranks"
        )
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{label}: arguments differ in length: {sizes}")
    return next(iter(sizes.values()))


def _per_rank(value: Any, world_size: int, label: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{label}: every argument must be a list with one entry per rank, not {type(value).__name__}")
    if len(value) != world_size:
        raise ValueError(f"{label}: a list of {len(value)} entries for {world_size} ranks")
    return value


def _cut(value: Any, world_size: int) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        return [value] * world_size
    bounds = [len(value) * rank // world_size for rank in range(world_size + 1)]
    return [value[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)]


def _chunk(value: Any, world_size: int) -> Sequence[Any]:
    if not isinstance(value, DataProto):
        return [value] * world_size
    return (pad_dataproto_to_divisor(value, world_size)[0] if len(value) % world_size else value).chunk(world_size)


def _join(results: list[Any], label: str) -> list[Any]:
    _check_results(results, list | tuple, label)
    return list(chain.from_iterable(results))


def _concat(results: list[Any], size: int, pad_size: int, label: str) -> DataProto:
    _check_results(results, DataProto, label)
    joined = DataProto.concat(results)
    if not pad_size or not len(joined):
        return joined
    if len(joined) != size + pad_size:
        raise ValueError(f"{label}: {size} samples padded to {size + pad_size} came back as {len(joined)}")
    return unpad_dataproto(joined, pad_size)


def _check_results(results: list[Any], kind: Any, label: str) -> None:
    wrong = {rank: type(result).__name__ for rank, result in enumerate(results) if not isinstance(result, kind)}
    if wrong:
        raise TypeError(f"{label}: every rank must return a {getattr(kind, '__name__', kind)}; got {wrong}")
