"""Full or delta: what each would cost, from what this job has measured. Arithmetic; no torch, no I/O.

With N the bytes of a version, n those of one owner, f the changed fraction of its words and b the bits of a delta per
changed word of w bits:

    full    n / copy                            + N / link                + N / verify
    delta   n / encode + f * n / w * ENCODE_S   + N * f * b / w / link    + N / apply + f * N / w * APPLY_S

`link` is the rate at which a whole version arrives on the slowest node while all owners send, over as many hops as the
topology has. A way that is not in use must be faster by a tenth to be taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import log2

MARGIN = 0.9
"""What the other way may take of the time of the present one, at most, to be taken instead of it."""
ENCODE_S, APPLY_S = 3.5e-8, 2e-8
"""What a changed word costs beside reading it: measured on an Intel Xeon, the latter with two threads."""
MOST_OF_CHANGES = 0.8
"""So much of a time at most is put down to changes, when a rate is learned from it."""
LEAST_SAVED_S = 0.02
"""For less nobody looks what has changed."""
SMOOTHING = 0.5
"""The weight of the newest measurement."""

RECOVERY = 0.1
CHANGE_LIMITS = (1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
"""Changed fractions of tensors, for a histogram. In the first bin are those without a change."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes of the model per second. What has not been measured yet is a rate of one slow core."""

    copy: float = 4e9
    """An owner copies its pieces."""
    encode: float = 1.5e9
    """An owner copies its pieces and finds that nothing changed."""
    link: float = 0.0
    """Bytes arrive on a node; 0: not known."""
    verify: float = 6e9
    """A node digests what has arrived."""
    apply: float = 1.5e9
    """A node makes a version of the previous one, and digests it, if nothing changed."""

    def with_measured(self, **measured: float) -> Rates:
        """After a sync that measured these rates."""
        known = {name: rate for name, rate in measured.items() if rate > 0}
        before = {name: getattr(self, name) for name in known}
        default = Rates()
        return replace(
            self,
            **{
                name: rate
                if before[name] == getattr(default, name)
                else SMOOTHING * rate + (1 - SMOOTHING) * before[name]
                for name, rate in known.items()
            },
        )

    def recovered(self) -> Rates:
        """The rates after a full sync: those that it did not measure approach their usual values. So one slow sync with
        deltas, on a busy host, does not exclude deltas for ever."""
        usual = Rates()
        return replace(
            self,
            encode=max(self.encode, RECOVERY * usual.encode + (1 - RECOVERY) * self.encode),
            apply=max(self.apply, RECOVERY * usual.apply + (1 - RECOVERY) * self.apply),
        )


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Seconds of publish, stage and verify."""

    full_s: float
    delta_s: float


@dataclass(frozen=True, kw_only=True)
class DeltaRequest:
    """What the manager tells trainer ranks before a sync in which deltas may be sent."""

    base: int
    """The version that nodes hold."""
    always: bool
    """Do not choose."""
    rates: Rates
    nbytes: int
    """Of the whole version."""
    was_delta: bool
    """The way of the last sync."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What one trainer rank did with a `DeltaRequest`."""

    nbytes: int
    """Of its deltas; 0: it published in full."""
    nbytes_full: int
    words: int
    """Of the pieces that were compared: all of them, or a sample."""
    changed: int
    """Of these, the words that were not what they had been."""
    changed_of_pieces: bytes = b""
    """32-bit integers, one for each of its pieces; empty for a sample."""
    seconds: float = 0.0
    """To copy and compare."""
    predicted: Predicted | None = None


@dataclass(frozen=True, kw_only=True)
class Staging:
    """What one node did in staging."""

    fetch_s: float = 0.0
    apply_s: float = 0.0
    pieces_whole: int = 0
    """That were fetched whole, because their deltas or their base were no good."""


@dataclass(frozen=True, kw_only=True)
class DeltaReport:
    """How a version was moved, of syncs in which deltas were possible."""

    way: str
    """`full`, `delta`, or `mixed`: some owners sent the one, some the other."""
    base: int
    changed_fraction: float
    """Of the words that were compared."""
    bits_per_change: float = 0.0
    nbytes_full: int = 0
    """Of one version."""
    nbytes_delta: int = 0
    """Of the deltas of all owners."""
    predicted_full_s: float = 0.0
    predicted_delta_s: float = 0.0
    actual_s: float = 0.0
    """Publish, stage and verify."""
    encode_s: float = 0.0
    """The slowest owner's copying and comparing."""
    fetch_s: float = 0.0
    """The slowest node's."""
    apply_s: float = 0.0
    pieces_whole: int = 0
    tensors_unchanged: int = 0
    most_changed: list[tuple[str, float]] = field(default_factory=list)
    """Ten tensors with the largest changed fractions."""
    tensors_by_change: list[int] = field(default_factory=list)
    """How many tensors changed by at most each of `CHANGE_LIMITS`, and by more than the one before it; empty unless all
    were compared."""

    @property
    def summary(self) -> str:
        """For the log."""
        if self.way == "full":
            return f"in full, {self.changed_fraction:.2%} of what was compared had changed"
        times = self.nbytes_full / max(self.nbytes_delta, 1)
        return f"{self.way}: {self.changed_fraction:.2%} changed, {times:.0f} times fewer bytes"


def bits_per_change(fraction: float) -> float:
    """About what `delta_codec` needs for a changed word of bfloat16: the entropy of its place, a sign, and a size."""
    p = min(max(fraction, 1e-9), 1 - 1e-9)
    return -(p * log2(p) + (1 - p) * log2(1 - p)) / p + 2.0


def predict(rates: Rates, *, nbytes: int, owner_nbytes: int, fraction: float, word_nbytes: float) -> Predicted:
    """`fraction`: of words of `word_nbytes` bytes on the mean that changed. Seconds."""
    link = rates.link or float("inf")
    moved = min(fraction * bits_per_change(fraction) / (8 * word_nbytes), 1.0)
    return Predicted(
        full_s=owner_nbytes / rates.copy + nbytes / link + nbytes / rates.verify,
        delta_s=owner_nbytes / rates.encode
        + fraction * owner_nbytes / word_nbytes * ENCODE_S
        + nbytes * moved / link
        + nbytes / rates.apply
        + fraction * nbytes / word_nbytes * APPLY_S,
    )


def rate_without_changes(nbytes: float, seconds: float, changed_words: float, change_s: float) -> float:
    """Bytes per second of a pass that met so many changes, had it met none; 0 if it was not measured."""
    if seconds <= 0:
        return 0.0
    return nbytes / (seconds - min(changed_words * change_s, MOST_OF_CHANGES * seconds))


def prefers_delta(predicted: Predicted, *, was_delta: bool) -> bool:
    if was_delta:
        return predicted.full_s >= MARGIN * predicted.delta_s
    saved_s = predicted.full_s - predicted.delta_s
    return predicted.delta_s < MARGIN * predicted.full_s and saved_s > LEAST_SAVED_S
