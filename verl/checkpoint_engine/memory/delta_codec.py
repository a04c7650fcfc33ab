"""A lossless code of the changes between two versions of a piece, in compiled loops without Python's global lock.

A piece is a run of words of 1, 2, 4 or 8 bytes. The difference of a word is that of its bit patterns as integers,
modulo 2 ** bits: it is +-1 between neighbouring values of a float, and every pattern (NaN, -0.0) has one. A delta is a
head and one stream of bits, in 64-bit words; for every changed word it has

    gap      the number of unchanged words before it
    sign     of the difference
    size     of the difference, less 1, if sizes vary for the old word's exponent ("wide"). For other exponents size 1
             is implied, and the stream has lengths of runs of them: run, size less 2 of the word after it, run, ...

all of them in Rice codes (R. F. Rice, "Some practical universal noiseless coding techniques", JPL 79-22, 1979). Gaps of
evenly spread changes are geometric; for them the code is within some hundredths of a bit of the entropy. An update
moves small values by many units in the last place and large ones by one, so each exponent has its own parameter.

The type Any in signatures stands for 64-bit integers of the compiled code.

The decoder is safe for any input: it writes only to its piece, and reads at most `PADDING_NBYTES` behind its words.
"""

from __future__ import annotations

from collections.abc import Callable
from math import expm1, log1p, log2
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

HEAD_WORDS = 6
"""Number of changed words; parameters; 32 parameters of exponents, a byte each."""
PADDING_NBYTES = 64
"""The code of one change is shorter."""
TOO_LARGE = -1
"""Result of `encode`: the delta does not fit into `room`."""
BAD = -1
"""Result of `decode`: the words are not a delta of such a piece."""
SCRATCH = (np.int64, np.uint64, np.int64, np.uint8)
"""Types of the notes on a changed word: number, old value, difference, and (in `encode`) class of its exponent."""
CLASSES = 32
UNDERSTOOD = 255
"""Instead of a parameter: differences of this exponent are +-1, except for outliers."""
MOST_PARAMETER = 36
MOST_UNARY = 24
"""A longer quotient is written as this many zeros, followed by the whole number."""


F = TypeVar("F", bound=Callable[..., Any])


def _compiled(function: F) -> F:
    compiled: F = njit(nogil=True, cache=True)(function)
    return compiled


def _inlined(function: F) -> F:
    inlined: F = njit(nogil=True, cache=True, inline="always")(function)
    return inlined


def _intrinsic(function: Callable[..., Any]) -> Any:
    return intrinsic(function)


def _memory_intrinsics(bits: int) -> tuple[Any, Any]:
    """(load, store) of one integer at any address."""
    width = ir.IntType(bits)

    @_intrinsic
    def load(context: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], width.as_pointer())
            return builder.zext(builder.load(pointer, align=1), ir.IntType(64))

        return types.uint64(types.uint64), code

    @_intrinsic
    def store(context: Any, address: Any, value: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], width.as_pointer())
            builder.store(builder.trunc(arguments[1], width), pointer, align=1)
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64), code

    return load, store


_load8, _store8 = _memory_intrinsics(8)
_load16, _store16 = _memory_intrinsics(16)
_load32, _store32 = _memory_intrinsics(32)
_load64, _store64 = _memory_intrinsics(64)


@_intrinsic
def _trailing_zeros(context: Any, word: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), code


U0, U1, U64 = np.uint64(0), np.uint64(1), np.uint64(64)


@_compiled
def _last_word(address: Any, nbytes: Any) -> Any:
    """Fewer than 8 bytes as a word."""
    word = U0
    for index in range(nbytes):
        word |= _load8(np.uint64(address + index)) << np.uint64(8 * index)
    return word


@_compiled
def replace(new: Any, old: Any, nbytes: Any, width: Any, positions: Any, before: Any, differences: Any) -> Any:
    """Copy the piece at address `new` over the one at `old`; return how many words of `width` bytes differed.

    Writes the number, old value and difference of each into `positions`, `before` and `differences`, in order.
    """
    count, index, whole = 0, 0, nbytes // 8
    here, there = np.uint64(new), np.uint64(old)
    while index < whole:
        if index + 8 <= whole:
            differ = U0
            for step in range(8):
                differ |= _load64(here + np.uint64(8 * step)) ^ _load64(there + np.uint64(8 * step))
            if differ == U0:
                index += 8
                here += U64
                there += U64
                continue
        for _ in range(min(8, whole - index)):
            a, b = _load64(here), _load64(there)
            if a != b:
                _store64(there, a)
                count = _note(count, a, b, index, width, positions, before, differences)
            index += 1
            here += np.uint64(8)
            there += np.uint64(8)
    rest = nbytes - 8 * whole
    if rest:
        a, b = _last_word(new + 8 * whole, rest), _last_word(old + 8 * whole, rest)
        for byte in range(rest):
            _store8(there + np.uint64(byte), (a >> np.uint64(8 * byte)) & np.uint64(255))
        count = _note(count, a, b, whole, width, positions, before, differences)
    return count


@_inlined
def _word_at(address: Any, width: Any) -> Any:
    if width == 2:
        return _load16(address)
    if width == 4:
        return _load32(address)
    return _load8(address) if width == 1 else _load64(address)


@_inlined
def _set_word(address: Any, width: Any, value: Any) -> None:
    if width == 2:
        _store16(address, value)
    elif width == 4:
        _store32(address, value)
    elif width == 1:
        _store8(address, value)
    else:
        _store64(address, value)


@_compiled
def replace_at(
    positions: Any, words: Any, first: Any, old: Any, width: Any, numbers: Any, before: Any, differences: Any
) -> None:
    """Write `words` to the words numbered `positions` of the piece at address `old`, which begins with number `first`.

    Writes the notes of `replace` on each: number within the piece, old value and difference.
    """
    bits = np.uint64(8 * width)
    lane, half = ~U0 >> (U64 - bits), U1 << (bits - U1)
    for index in range(len(positions)):
        number = np.int64(positions[index]) - first
        address = np.uint64(old + number * width)
        is_now, was = np.uint64(words[index]) & lane, _word_at(address, width)
        _set_word(address, width, is_now)
        difference = (is_now - was) & lane
        numbers[index] = number
        before[index] = was
        differences[index] = np.int64((difference ^ half) - half)


@_inlined
def _note(count: Any, a: Any, b: Any, index: Any, width: Any, positions: Any, before: Any, differences: Any) -> Any:
    """Note what differs between `a`, which is new, and `b`, the words numbered `index` of 8 bytes."""
    bits = np.uint64(8 * width)
    lane, half, log_bits = ~U0 >> (U64 - bits), U1 << (bits - U1), _trailing_zeros(bits)
    first = np.uint64(index) << (np.uint64(6) - log_bits)
    changed = a ^ b
    while changed != U0:
        shift = _trailing_zeros(changed) & ~(bits - U1)
        was = (b >> shift) & lane
        difference = (((a >> shift) & lane) - was) & lane
        positions[count] = np.int64(first + (shift >> log_bits))
        before[count] = was
        differences[count] = np.int64((difference ^ half) - half)  # with its sign
        count += 1
        changed &= ~(lane << shift)
    return count


@_compiled
def _parameter_for(mean: Any) -> Any:
    """Of the Rice code that is shortest for geometrically distributed numbers with that mean."""
    if mean <= 0.0:
        return 0
    parameter = min(max(int(log2(mean * 0.69 + 1e-9)), 0), MOST_PARAMETER - 1)
    if _mean_nbits(mean, parameter + 1) < _mean_nbits(mean, parameter):
        return parameter + 1
    return parameter


@_inlined
def _mean_nbits(mean: Any, parameter: Any) -> Any:
    return 1.0 + parameter + 1.0 / expm1(2.0**parameter * log1p(1.0 / mean))


@_inlined
def _put(out: Any, word: Any, held: Any, bits: Any, value: Any, nbits: Any) -> Any:
    """Append `nbits` < 64 bits to a stream: `word` words are written, and `held` has `bits` more."""
    held |= value << bits
    bits += nbits
    if bits >= U64:
        out[word] = held
        word += 1
        bits -= U64
        held = value >> (nbits - bits)
    return word, held, bits


@_inlined
def _put_number(out: Any, word: Any, held: Any, bits: Any, number: Any, parameter: Any, sign: Any, signs: int) -> Any:
    """Append a number, and behind it `signs` bits, 0 or 1."""
    quotient = number >> parameter
    if quotient < MOST_UNARY:
        low = np.uint64(number) & ((U1 << np.uint64(parameter)) - U1)
        code = U1 | (low << U1) | (sign << np.uint64(parameter + 1))
        return _put(out, word, held, bits, code << np.uint64(quotient), np.uint64(quotient + 1 + parameter + signs))
    word, held, bits = _put(out, word, held, bits, U1 << np.uint64(MOST_UNARY), np.uint64(MOST_UNARY + 1))
    word, held, bits = _put(out, word, held, bits, np.uint64(number) & np.uint64(0xFFFFFFFF), np.uint64(32))
    high = (np.uint64(number) >> np.uint64(32)) | sign << np.uint64(32)
    return _put(out, word, held, bits, high, np.uint64(32 + signs))


@_inlined
def _class_of(word: Any, shift: Any, mask: Any, lowest: Any) -> Any:
    return min(max(np.int64((word >> shift) & mask) - lowest, 0), CLASSES - 1)


@_inlined
def _size_of(difference: Any) -> Any:
    """|difference|; of the one that has no positive counterpart 2 ** 63 - 1, and its sign tells the rest."""
    return difference if difference >= 0 else -(difference + 1) + 1


@_compiled
def _plan_sizes(count: Any, before: Any, differences: Any, shift: Any, mask: Any, kinds: Any, classes: Any) -> Any:
    """Fill `classes`, and `kinds` with the class of every word, as it becomes the code of its size.

    Returns the lowest exponent that has a class of its own, and the parameters for runs and outliers.
    """
    highest = U0
    for index in range(count):
        highest = max(highest, (before[index] >> shift) & mask)
    lowest = max(np.int64(highest) - CLASSES + 1, 0)
    number, ones, total = np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64), np.zeros(CLASSES)
    for index in range(count):
        which = _class_of(before[index], shift, mask, lowest)
        size = _size_of(differences[index])
        number[which] += 1
        ones[which] += size == 1
        total[which] += size - 1
        kinds[index] = which
    outliers, understood, excess = 0.0, 0.0, 0.0
    for which in range(CLASSES):
        parameter = _parameter_for(total[which] / max(number[which], 1))
        wide = number[which] * _mean_nbits(max(total[which] / max(number[which], 1), 1e-9), parameter)
        others = number[which] - ones[which]
        share = min(max(others / max(number[which], 1), 1e-9), 1 - 1e-9)
        after = (total[which] - others) / max(others, 1)
        run = -number[which] * (share * log2(share) + (1 - share) * log2(1 - share))
        if run + others * (1.0 + after) <= wide:  # outliers of all exponents have one code, so they must be small
            classes[which] = UNDERSTOOD
            outliers, understood, excess = outliers + others, understood + ones[which], excess + total[which] - others
        else:
            classes[which] = parameter
    return lowest, _parameter_for(understood / max(outliers, 1.0)), _parameter_for(excess / max(outliers, 1.0))


@_compiled
def encode(
    count: Any, positions: Any, before: Any, differences: Any, kinds: Any, shift: Any, mask: Any, out: Any, room: int
) -> Any:
    """Encode the `count` changes that `replace` noted into `out`; return its words, at most `room`, or TOO_LARGE.

    `shift` and `mask` extract a word's exponent. `kinds`: scratch memory of `count` bytes.
    """
    ushift, umask = np.uint64(shift), np.uint64(mask)
    limit = room - 8
    if limit < HEAD_WORDS:
        return TOO_LARGE
    classes = np.zeros(CLASSES, np.uint8)
    lowest, runs, sizes = _plan_sizes(count, before, differences, ushift, umask, kinds, classes)
    unchanged = positions[count - 1] + 1 - count if count else 0
    gaps = _parameter_for(unchanged / max(count, 1))
    out[:HEAD_WORDS] = U0
    out[0] = np.uint64(count)
    out[1] = np.uint64(gaps | runs << 8 | sizes << 16 | lowest << 24)
    for which in range(CLASSES):
        out[2 + which // 8] |= np.uint64(classes[which]) << np.uint64(8 * (which % 8))
    word, held, bits, last, outlier = HEAD_WORDS, U0, U0, np.int64(-1), np.int64(-1)
    for index in range(count):
        if word > limit:
            return TOO_LARGE
        difference = differences[index]
        sign = U1 if difference < 0 else U0
        word, held, bits = _put_number(out, word, held, bits, positions[index] - last - 1, gaps, sign, 1)
        last = positions[index]
        parameter = np.int64(classes[kinds[index]])
        if parameter != UNDERSTOOD:
            word, held, bits = _put_number(out, word, held, bits, _size_of(difference) - 1, parameter, U0, 0)
            continue
        if index > outlier:  # the next outlier is to be found, and how far away it is to be said
            run, outlier = 0, np.int64(index)
            while outlier < count:
                if classes[kinds[outlier]] == UNDERSTOOD:
                    if _size_of(differences[outlier]) != 1:
                        break
                    run += 1
                outlier += 1
            word, held, bits = _put_number(out, word, held, bits, run, runs, U0, 0)
        if index == outlier:
            word, held, bits = _put_number(out, word, held, bits, _size_of(difference) - 2, sizes, U0, 0)
    out[word] = held
    return word + (1 if bits else 0)


@_inlined
def _bits_at(words: Any, bit: Any) -> Any:
    """The 64 bits from there on."""
    address, offset = np.uint64(words + ((bit >> 6) << 3)), np.uint64(bit & 63)
    low = _load64(address) >> offset
    return low if offset == U0 else low | (_load64(address + np.uint64(8)) << (U64 - offset))


@_inlined
def _number_at(words: Any, bit: Any, parameter: Any) -> Any:
    """A number, the bit behind it, and where it ends; the number is less than 0 if no number begins there."""
    here = _bits_at(words, bit)
    quotient: Any = np.int64(_trailing_zeros(here))
    if quotient < MOST_UNARY and parameter <= MOST_PARAMETER:
        rest = here >> np.uint64(quotient + 1)
        low = rest & ((U1 << np.uint64(parameter)) - U1)
        behind = (rest >> np.uint64(parameter)) & U1
        return (quotient << parameter) | np.int64(low), behind, bit + quotient + 1 + parameter
    if quotient != MOST_UNARY or parameter > MOST_PARAMETER:
        return np.int64(-1), U0, bit
    bit += quotient + 1
    return np.int64(_bits_at(words, bit)), _bits_at(words, bit + 64) & U1, bit + 64


@_compiled
def decode(words: Any, num_words: Any, piece: Any, nbytes: Any, width: Any, shift: Any, mask: Any) -> Any:
    """Change the piece at address `piece` from the old version to the new; return the changed words, or BAD.

    `words` is the address of the delta; `PADDING_NBYTES` behind it must be readable. After BAD the piece holds neither
    version.
    """
    ushift, umask = np.uint64(shift), np.uint64(mask)
    if num_words < HEAD_WORDS:
        return BAD
    count, parameters = np.int64(_load64(np.uint64(words))), _load64(np.uint64(words + 8))
    gaps, runs = np.int64(parameters & np.uint64(255)), np.int64((parameters >> np.uint64(8)) & np.uint64(255))
    sizes, lowest = np.int64((parameters >> np.uint64(16)) & np.uint64(255)), np.int64(parameters >> np.uint64(24))
    total = nbytes // width
    if count < 0 or count > total or max(gaps, runs, sizes) > MOST_PARAMETER or lowest < 0 or lowest > mask:
        return BAD
    lane = ~U0 >> np.uint64(64 - 8 * width)
    bit, end = 64 * HEAD_WORDS, 64 * num_words
    position, run = np.int64(-1), np.int64(-1)
    for _ in range(count):
        gap, negative, bit = _number_at(words, bit, gaps)
        bit += 1
        if gap < 0 or gap >= total - position - 1 or bit > end:
            return BAD
        position += gap + 1
        address = np.uint64(piece + position * width)
        was = _word_at(address, width)
        parameter = np.int64(_load8(np.uint64(words + 16 + _class_of(was, ushift, umask, lowest))))
        size = np.int64(1)
        if parameter != UNDERSTOOD:
            number, _, bit = _number_at(words, bit, parameter)
            size = number + 1
        else:
            number = np.int64(0)
            if run < 0:
                run, _, bit = _number_at(words, bit, runs)
                number = run
            if run == 0:
                number, _, bit = _number_at(words, bit, sizes)
                size = number + 2
            run -= 1
        if number < 0 or bit > end:
            return BAD
        value = (was - np.uint64(size) if negative != U0 else was + np.uint64(size)) & lane
        _set_word(address, width, value)
    return count


@_compiled
def count_changed(new: Any, old: Any, nbytes: Any, width: Any) -> Any:
    """The number of words of `width` bytes that differ between two pieces."""
    bits = np.uint64(8 * width)
    lane, count = ~U0 >> (U64 - bits), 0
    for index in range((nbytes + 7) // 8):
        rest = nbytes - 8 * index
        if rest >= 8:
            changed = _load64(np.uint64(new + 8 * index)) ^ _load64(np.uint64(old + 8 * index))
        else:
            changed = _last_word(new + 8 * index, rest) ^ _last_word(old + 8 * index, rest)
        while changed != U0:
            count += 1
            changed &= ~(lane << (_trailing_zeros(changed) & ~(bits - U1)))
    return count


_warming = Lock()


def warm() -> None:
    """Compile all functions, or load them from numba's cache on disk. The first call takes seconds."""
    old, new = np.zeros(16, np.uint8), np.zeros(16, np.uint8)
    new[::5] = 1
    positions, before, differences, kinds = (np.empty(16, kind) for kind in SCRATCH)
    out = np.zeros(64, np.uint64)
    source, target = new.ctypes.data, old.ctypes.data
    with _warming:  # one thread compiles, others wait for it
        count_changed(source, target, 16, 2)
        count = replace(source, target, 16, 2, positions, before, differences)
        words = encode(count, positions, before, differences, kinds, 7, 255, out, 56)
        decode(out.ctypes.data, words, target, 16, 2, 7, 255)
