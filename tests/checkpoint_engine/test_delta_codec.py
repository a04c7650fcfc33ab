"""Deltas of pieces: whatever a piece was and becomes, it comes out bit by bit; and what is no delta is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.checkpoint_engine.memory import delta_codec
from verl.checkpoint_engine.memory.delta import EXPONENTS

MOST = 1000
WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
CODES = [(1, 0, 0), (2, 0, 0), (4, 0, 0), (8, 0, 0), *((ITEM, *EXPONENTS[name]) for name, ITEM in (
    ("bfloat16", 2), ("float16", 2), ("float32", 4), ("float64", 8), ("float8_e4m3fn", 1), ("float8_e5m2", 1)
))]  # fmt: skip


def encoded(old: np.ndarray, new: np.ndarray, code: tuple[int, int, int], room: int | None = None) -> np.ndarray | None:
    """The words of the delta, with the padding that a decoder may read; None if there is no room."""
    width, shift, mask = code
    scratch = [np.empty(MOST, kind) for kind in delta_codec.SCRATCH]
    held = old.copy()
    count = delta_codec.replace(new.ctypes.data, held.ctypes.data, new.nbytes, width, *scratch[:3])
    assert (held == new).all()
    assert count == (old != new).sum()
    out = np.full(12 * MOST, 2**64 - 1, np.uint64)
    words = delta_codec.encode(count, *scratch, shift, mask, out, room or len(out))
    return None if words == delta_codec.TOO_LARGE else out[: words + delta_codec.PADDING_NBYTES // 8]


def decoded(words: np.ndarray, old: np.ndarray, code: tuple[int, int, int]) -> np.ndarray | None:
    guard = 8
    memory = np.full(old.nbytes + 2 * guard, 0xA5, np.uint8)
    memory[guard:-guard] = old.view(np.uint8)
    length = len(words) - delta_codec.PADDING_NBYTES // 8
    count = delta_codec.decode(words.ctypes.data, length, memory.ctypes.data + guard, old.nbytes, *code)
    assert (memory[:guard] == 0xA5).all()
    assert (memory[-guard:] == 0xA5).all()
    return None if count == delta_codec.BAD else memory[guard:-guard].view(old.dtype)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, tuple[int, int, int]]:
    """Old and new words of any patterns, NaN and -0.0 among them; any share changed, by little or by anything."""
    code = draw(st.sampled_from(CODES))
    kind = WIDTHS[code[0]]
    words = draw(st.integers(0, MOST))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    top = np.iinfo(kind).max
    old = random.integers(0, top, words, kind, endpoint=True)
    special = np.array([0, top, 1 << (8 * code[0] - 1)], kind)  # +0.0; a NaN; -0.0
    old[random.random(words) < 0.1] = special[draw(st.integers(0, 2))]
    near = old + random.choice(np.array([1, top], kind), words)
    far = random.integers(0, top, words, kind, endpoint=True)
    is_changed = random.random(words) < draw(st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]))
    is_far = random.random(words) < draw(st.sampled_from([0.0, 0.1, 1.0]))
    return old, np.where(is_changed, np.where(is_far, far, near), old).astype(kind), code


@settings(max_examples=400, deadline=None)
@given(pieces())
def test_what_was_encoded_is_decoded(case: tuple[np.ndarray, np.ndarray, tuple[int, int, int]]):
    old, new, code = case
    words = encoded(old, new, code)
    assert words is not None
    found = decoded(words, old, code)
    assert found is not None
    assert (found == new).all()


@settings(max_examples=400, deadline=None)
@given(pieces(), st.data())
def test_words_that_were_damaged_never_reach_outside_of_the_piece(
    case: tuple[np.ndarray, np.ndarray, tuple[int, int, int]], data: st.DataObject
):
    old, new, code = case
    words = encoded(old, new, code)
    assert words is not None
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 8 * len(words) - 1))
        words.view(np.uint8)[place] ^= data.draw(st.integers(1, 255))
    decoded(words, old, code)  # which looks at what lies beside the piece


@settings(max_examples=100, deadline=None)
@given(pieces())
def test_words_that_are_cut_off_are_refused(case: tuple[np.ndarray, np.ndarray, tuple[int, int, int]]):
    old, new, code = case
    words = encoded(old, new, code)
    assert words is not None
    length = len(words) - delta_codec.PADDING_NBYTES // 8
    for cut in {0, delta_codec.HEAD_WORDS, length // 2} - {length}:
        piece = old.copy()
        count = delta_codec.decode(words.ctypes.data, cut, piece.ctypes.data, piece.nbytes, *code)
        assert count == delta_codec.BAD


def test_a_count_that_no_piece_has_is_refused_at_once():
    words = np.zeros(100, np.uint64)
    piece = np.zeros(1000, np.uint16)
    for count in (1001, 2**40, 2**63 + 1):
        words[0] = count
        assert delta_codec.decode(words.ctypes.data, 50, piece.ctypes.data, piece.nbytes, 2, 7, 255) == delta_codec.BAD


def test_a_delta_that_is_larger_than_its_room_is_not_made():
    old = np.zeros(1000, np.uint16)
    new = np.arange(1000, dtype=np.uint16) * 61
    assert encoded(old, new, (2, 7, 255), room=100) is None
    assert encoded(old, new, (2, 7, 255), room=2000) is not None


@pytest.mark.parametrize("changed", [0.005, 0.02, 0.05])
def test_a_changed_value_takes_about_the_entropy_of_its_place_and_a_sign(changed: float):
    random = np.random.default_rng(0)
    old = random.integers(0x3C00, 0x3D00, MOST, np.uint16)
    total = changes = 0
    for _ in range(200):
        where = random.random(MOST) < changed
        new = np.where(where, old + random.choice(np.array([1, 2**16 - 1], np.uint16), MOST), old).astype(np.uint16)
        words = encoded(old, new, (2, 7, 255))
        assert words is not None
        total += 64 * (len(words) - delta_codec.PADDING_NBYTES // 8 - delta_codec.HEAD_WORDS)
        changes += int(where.sum())
    entropy = -(changed * np.log2(changed) + (1 - changed) * np.log2(1 - changed)) / changed
    assert total / changes < entropy + 1 + 64 / (changed * MOST)  # half a word at the end of a stream, and what is lost
