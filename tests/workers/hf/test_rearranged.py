"""Whatever functions make of real tensors, they make of symbolic ones: the pieces say where each element went."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.checkpoint_engine.plan.types import Box
from verl.workers.hf.rearranged import NotARearrangement, Rearranged

SOURCES = {"a": (4, 6), "b": (4, 6), "c": (4, 6, 2)}


def values_of(name: str) -> torch.Tensor:
    shape = SOURCES[name]
    first = 1000 * (1 + list(SOURCES).index(name))
    return torch.arange(first, first + torch.Size(shape).numel()).reshape(shape)


def both(name: str) -> tuple[Rearranged, torch.Tensor]:
    return Rearranged.of(name, SOURCES[name]), values_of(name)


def assert_same(symbolic: Rearranged, real: torch.Tensor) -> None:
    """Both ways: the elements that pieces give, and the elements that the origins get back."""
    assert tuple(symbolic.shape) == tuple(real.shape)
    made = torch.full(real.shape, -1)
    for piece in symbolic.pieces:
        place = tuple(map(slice, piece.box.start, piece.box.stop))
        origin = tuple(map(slice, piece.origin_box.start, piece.origin_box.stop))
        values = values_of(piece.origin)[origin]
        made[place] = piece.to_rearranged(values)
        assert torch.equal(piece.to_origin(real[place]), values)
        assert piece.in_rearranged(piece.origin_box) == piece.box
    assert torch.equal(made, real)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c: torch.stack([a, b]),
        lambda a, b, c: torch.stack([a, b], dim=1),
        lambda a, b, c: torch.cat([a, b], dim=0),
        lambda a, b, c: torch.cat([a, b], dim=-1),
        lambda a, b, c: torch.cat([torch.stack([a, b], dim=2), c], dim=-1),
        lambda a, b, c: c.permute(2, 0, 1),
        lambda a, b, c: torch.stack([a, b]).transpose(1, 2),
        lambda a, b, c: torch.transpose(c, 0, -1),
        lambda a, b, c: c.chunk(2, dim=1)[1],
        lambda a, b, c: torch.chunk(torch.cat([a, b]), 3)[1],
        lambda a, b, c: torch.split(a, [1, 3])[1],
        lambda a, b, c: c.unbind(2)[1],
        lambda a, b, c: c[:, 2:5],
        lambda a, b, c: c[..., 0],
        lambda a, b, c: c[1, :, 1].unsqueeze(0),
        lambda a, b, c: a.unsqueeze(1).squeeze(1).contiguous(),
        lambda a, b, c: torch.stack([a.chunk(2)[0].T if False else a.chunk(2)[0], b.chunk(2)[1]], dim=-1)[1:],
    ],
)
def test_what_is_done_to_tensors_is_known_of_every_element(function):
    pairs = [both(name) for name in SOURCES]
    assert_same(function(*(symbolic for symbolic, _ in pairs)), function(*(real for _, real in pairs)))


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["transpose", "narrow", "unsqueeze", "index", "stack", "cat"]), st.integers(0, 5)),
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(OPERATIONS)
def test_chains_of_operations_keep_track(operations):
    symbolic, real = both("c")
    for name, number in operations:
        dim = number % max(real.dim(), 1)
        if name == "transpose" and real.dim() > 1:
            symbolic, real = symbolic.transpose(dim, 0), real.transpose(dim, 0)
        elif name == "narrow" and real.dim() and real.shape[dim] > 1:
            symbolic, real = symbolic.narrow(dim, 1, real.shape[dim] - 1), real.narrow(dim, 1, real.shape[dim] - 1)
        elif name == "unsqueeze":
            symbolic, real = symbolic.unsqueeze(dim), real.unsqueeze(dim)
        elif name == "index" and real.dim() > 1:
            symbolic, real = symbolic[0], real[0]
        elif name == "stack":
            symbolic, real = torch.stack([symbolic, symbolic], dim=dim), torch.stack([real, real], dim=dim)
        elif name == "cat" and real.dim():
            symbolic, real = torch.cat([symbolic, symbolic], dim=dim), torch.cat([real, real], dim=dim)
    assert_same(symbolic, real)


def test_a_part_of_a_piece_is_a_part_on_both_sides():
    symbolic, real = both("a")
    piece = torch.stack([symbolic, symbolic]).pieces[1]
    inner = piece.narrowed(Box((0, 2, 1), (2, 4, 9)))
    assert inner is not None
    assert inner.box == Box((1, 2, 1), (2, 4, 6))
    assert inner.origin_box == Box((2, 1), (4, 6))
    assert piece.narrowed(Box((0, 0, 0), (1, 4, 6))) is None
    assert piece.in_rearranged(Box((3, 0), (4, 2))) == Box((1, 3, 0), (2, 4, 2))
    assert torch.equal(inner.to_rearranged(real[2:4, 1:6])[0], real[2:4, 1:6])


@pytest.mark.parametrize(
    "function",
    [lambda a: a * 2, lambda a: a + a, lambda a: a[::2], lambda a: torch.exp(a), lambda a: a.reshape(3, 8)],
)
def test_arithmetic_and_interleaving_are_refused(function):
    with pytest.raises((NotARearrangement, TypeError)):
        function(both("a")[0])
