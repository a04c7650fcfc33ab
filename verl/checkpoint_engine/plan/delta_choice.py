"""Choose full or delta: predict the seconds of each from rates that this job has measured. No torch, no I/O.

With N the bytes of a version, n those of one owner, f the changed fraction of its words and b the bits of a delta per
changed word of w bits:

    full    n / copy                            + N / link                + N / verify
    delta   n / encode + f * n / w * ENCODE_S   + N * f * b / w / link    + N / apply + f * N / w * APPLY_S

`link` is the rate at which a whole version arrives on the slowest node while all owners send, over all hops of the
topology. The choice changes only if the other way is faster by a tenth.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import log2

MARGIN = 0.9
"""The choice changes if the other way takes at most this fraction of the present one's time."""
ENCODE_S, APPLY_S = 3.5e-8, 2e-8
"""Seconds per changed word, beside reading it: measured on an Intel Xeon, APPLY_S with two threads."""
MOST_OF_CHANGES = 0.8
"""A measured time counts at most this fraction as the cost of changes, when a rate is computed from it."""
LEAST_SAVED_S = 0.02
"""Owners do not compare with the base to save less than this."""
SMOOTHING = 0.5
"""The weight of the newest measurement."""

RECOVERY = 0.1
CHANGE_LIMITS = (1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
"""Bin limits of a histogram of tensors by changed fraction. The first bin includes unchanged tensors."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes of the model per second. The defaults, until measured, are those of one slow core."""

    copy: float = 4e9
    """At which an owner copies its pieces."""
    encode: float = 1.5e9
    """At which an owner copies its pieces and compares them with the base, if nothing changed."""
    link: float = 0.0
    """At which bytes arrive on a node; 0: not measured."""
    verify: float = 6e9
    """At which a node digests a version."""
    apply: float = 1.5e9
    """At which a node makes a version from the base and digests it, if nothing changed."""

    def with_measured(self, **measured: float) -> Rates:
        """These rates after a sync that measured some. 0 is no measurement; the first one replaces a default."""
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
        """The rates after a full sync: `encode` and `apply`, which it did not measure, approach their defaults. So one
        slow sync with deltas, on a busy host, does not exclude deltas for ever."""
        usual = Rates()
        return replace(
            self,
            encode=max(self.encode, RECOVERY * usual.encode + (1 - RECOVERY) * self.encode),
            apply=max(self.apply, RECOVERY * usual.apply + (1 - RECOVERY) * self.apply),
        )


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Predicted seconds of publish, stage and verify together."""

    full_s: float
    delta_s: float


@dataclass(frozen=True, kw_only=True)
class DeltaRequest:
    """The manager's request to trainer ranks before a sync in which they may send deltas."""

    base: int
    """The version that nodes hold."""
    always: bool
    """Send deltas without predicting: `checkpoint_engine.delta=always`."""
    rates: Rates
    nbytes: int
    """Bytes of the whole version."""
    was_delta: bool
    """Whether the last sync sent deltas."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """One trainer rank's answer to a `DeltaRequest`."""

    nbytes: int
    """Bytes of its deltas; 0: it published in full."""
    nbytes_full: int
    words: int
    """Words compared: of all its pieces, or of a sample."""
    changed: int
    """How many of the compared words had changed."""
    changed_of_pieces: bytes = b""
    """Changed words of each of its pieces, as 32-bit integers; empty if it compared a sample."""
    seconds: float = 0.0
    """The time to copy and compare."""
    predicted: Predicted | None = None


@dataclass(frozen=True, kw_only=True)
class Staging:
    """How one node staged a version for which deltas were offered."""

    fetch_s: float = 0.0
    apply_s: float = 0.0
    pieces_whole: int = 0
    """Pieces that it fetched whole, because their deltas or their base were damaged."""


@dataclass(frozen=True, kw_only=True)
class DeltaReport:
    """How a sync with a `DeltaRequest` moved its version."""

    way: str
    """`full`, `delta`, or `mixed`: some owners sent deltas, the others all bytes."""
    base: int
    changed_fraction: float
    """Changed words as a fraction of the compared ones."""
    bits_per_change: float = 0.0
    nbytes_full: int = 0
    """Bytes of one version."""
    nbytes_delta: int = 0
    """Bytes of the deltas of all owners."""
    predicted_full_s: float = 0.0
    predicted_delta_s: float = 0.0
    actual_s: float = 0.0
    """Publish, stage and verify together."""
    encode_s: float = 0.0
    """The slowest owner's time to copy and compare."""
    fetch_s: float = 0.0
    """The slowest node's time to fetch; `apply_s` likewise."""
    apply_s: float = 0.0
    pieces_whole: int = 0
    tensors_unchanged: int = 0
    most_changed: list[tuple[str, float]] = field(default_factory=list)
    """The ten tensors with the largest changed fractions."""
    tensors_by_change: list[int] = field(default_factory=list)
    """Tensors per bin of `CHANGE_LIMITS`; of a tensor all words were compared. Empty if there is no such tensor."""

    @property
    def summary(self) -> str:
        """A phrase for the log."""
        if self.way == "full":
            return f"in full, {self.changed_fraction:.2%} of what was compared had changed"
        times = self.nbytes_full / max(self.nbytes_delta, 1)
        return f"{self.way}: {self.changed_fraction:.2%} changed, {times:.0f} times fewer bytes"


def bits_per_change(fraction: float) -> float:
    """Estimate of the bits of a changed bfloat16 word in `delta_codec`: entropy of its place, a sign, and a size."""
    p = min(max(fraction, 1e-9), 1 - 1e-9)
    return -(p * log2(p) + (1 - p) * log2(1 - p)) / p + 2.0


def predict(rates: Rates, *, nbytes: int, owner_nbytes: int, fraction: float, word_nbytes: float) -> Predicted:
    """Seconds of each way, by the module's formula. `fraction`: changed words; `word_nbytes`: their mean size."""
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
    """Bytes per second of a measured pass, less `change_s` for each changed word; 0 if it was not measured."""
    if seconds <= 0:
        return 0.0
    return nbytes / (seconds - min(changed_words * change_s, MOST_OF_CHANGES * seconds))


def prefers_delta(predicted: Predicted, *, was_delta: bool) -> bool:
    if was_delta:
        return predicted.full_s >= MARGIN * predicted.delta_s
    saved_s = predicted.full_s - predicted.delta_s
    return predicted.delta_s < MARGIN * predicted.full_s and saved_s > LEAST_SAVED_S
