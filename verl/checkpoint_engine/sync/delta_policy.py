"""The manager's policy on deltas: it decides whether a sync may move them, and measures rates. Runs on the driver.

Each owner then chooses full or delta (`plan/delta_choice.py`) from a sample of its changes and the measured rates. If
a delta could not be faster even without changes, the manager requests none and owners do not sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..config import CheckpointEngineConfig
from ..plan.delta_choice import (
    APPLY_S,
    CHANGE_LIMITS,
    ENCODE_S,
    DeltaReport,
    DeltaRequest,
    Encoded,
    Rates,
    Staging,
    predict,
    prefers_delta,
    rate_without_changes,
)
from ..plan.sync_plan import SyncPlan

MOST_CHANGED = 10
"""The most tensors that a report names."""
LEAST_FETCH_NBYTES = 2**26
"""A smaller transfer of deltas does not measure the link's rate."""


class DeltaPolicy:
    """Chooses the DeltaRequest of each sync of one job, from the rates that earlier syncs measured."""

    def __init__(self, config: CheckpointEngineConfig, *, possible: bool) -> None:
        """`possible`: the backend can move deltas."""
        self._mode = config.delta if possible and config.verify else "off"
        self._rates = Rates()
        self._is_warm = self._was_delta = False
        self._full_every = config.delta_full_every
        self._since_full = 0

    def request(self, base: int | None, plan: SyncPlan, *, across_hosts: bool) -> DeltaRequest | None:
        """The request to owners before a sync from version `base`; None: owners publish in full.

        `across_hosts`: a network lies between some owner and some node. Within a host, copying is faster than a delta.
        """
        if base is None or self._mode == "off":
            return None
        if self._full_every is not None and self._since_full + 1 >= self._full_every:
            return None
        nbytes = plan.layout.payload_nbytes
        asked = DeltaRequest(
            base=base,
            always=self._mode == "always",
            rates=self._rates,
            nbytes=nbytes,
            was_delta=self._was_delta,
        )
        if asked.always:
            return asked
        if not across_hosts or not self._rates.link:
            return None
        owner_nbytes = nbytes // max(plan.num_owners, 1)
        best = predict(self._rates, nbytes=nbytes, owner_nbytes=owner_nbytes, fraction=0.0, word_nbytes=2)
        return asked if prefers_delta(best, was_delta=self._was_delta) else None

    def learn(self, plan: SyncPlan, phase_s: Mapping[str, float], report: DeltaReport | None) -> None:
        """Update the rates from a sync that was committed at the first attempt."""
        nbytes = plan.layout.payload_nbytes
        if not self._is_warm:
            self._is_warm = True  # memory was touched for the first time: nothing is as slow again
        elif report is None or (report.way == "full" and report.predicted_full_s):  # else owners were warming up
            owner_nbytes = max(plan.owner_nbytes, default=0)
            self._rates = self._rates.with_measured(
                copy=_rate(owner_nbytes, phase_s["publish"]),
                link=_rate(nbytes, phase_s["stage"]),
                verify=_rate(nbytes, phase_s["verify"]),
            ).recovered()
        elif report.way == "delta":
            owners = max(plan.num_owners, 1)
            changed = report.changed_fraction * int(plan.layout.shapes.prod(axis=1).sum())
            self._rates = self._rates.with_measured(
                encode=rate_without_changes(nbytes / owners, report.encode_s, changed / owners, ENCODE_S),
                link=_rate(report.nbytes_delta, report.fetch_s) if report.nbytes_delta > LEAST_FETCH_NBYTES else 0.0,
                apply=rate_without_changes(nbytes, report.apply_s, changed, APPLY_S),
            )
        if report is not None:
            self._was_delta = report.way != "full"
        self._since_full = self._since_full + 1 if report is not None and report.way != "full" else 0


def _rate(nbytes: float, seconds: float) -> float:
    return nbytes / seconds if seconds > 0 else 0.0


def delta_report(
    plan: SyncPlan,
    request: DeltaRequest,
    encoded: Sequence[Encoded | None],
    staged: Sequence[Staging],
    actual_s: float,
) -> DeltaReport:
    """The report of a sync after `request`. `encoded`: one per owner, by rank. `staged`: one per node."""
    known = [one for one in encoded if one is not None]
    sent = [one for one in known if one.nbytes]
    words, changed = sum(one.words for one in known), sum(one.changed for one in known)
    nbytes = sum(one.nbytes for one in sent)
    way = "full" if not sent else "delta" if len(sent) == len(encoded) else "mixed"
    predicted = [one.predicted for one in known if one.predicted is not None]
    unchanged, most, by_change = _by_tensor(plan, encoded)
    return DeltaReport(
        way=way,
        base=request.base,
        changed_fraction=changed / words if words else 0.0,
        bits_per_change=8 * nbytes / max(sum(one.changed for one in sent), 1) if sent else 0.0,
        nbytes_full=plan.layout.payload_nbytes,
        nbytes_delta=nbytes,
        predicted_full_s=max((one.full_s for one in predicted), default=0.0),
        predicted_delta_s=max((one.delta_s for one in predicted), default=0.0),
        actual_s=actual_s,
        encode_s=max((one.seconds for one in sent), default=0.0),
        fetch_s=max((one.fetch_s for one in staged), default=0.0),
        apply_s=max((one.apply_s for one in staged), default=0.0),
        pieces_whole=sum(one.pieces_whole for one in staged),
        tensors_unchanged=unchanged,
        most_changed=most,
        tensors_by_change=by_change,
    )


def _by_tensor(plan: SyncPlan, encoded: Sequence[Encoded | None]) -> tuple[int, list[tuple[str, float]], list[int]]:
    """Tensors in which no word changed, those with the largest fractions, of owners that compared all of theirs, and
    how many there are up to each of `CHANGE_LIMITS`."""
    tensors = len(plan.layout.specs)
    changed, compared = np.zeros(tensors, np.int64), np.zeros(tensors, np.int64)
    numel = np.prod(plan.boxes.stop - plan.boxes.start, axis=1, dtype=np.int64)
    for owner, one in enumerate(encoded):
        if one is not None and one.changed_of_pieces:
            rows = slice(plan.pieces_of(owner).start, plan.pieces_of(owner).stop)
            np.add.at(changed, plan.boxes.tensor[rows], np.frombuffer(one.changed_of_pieces, np.int32))
            np.add.at(compared, plan.boxes.tensor[rows], numel[rows])
    fractions = changed / np.maximum(compared, 1)
    order = np.argsort(-fractions, kind="stable")[:MOST_CHANGED].tolist()
    most = [(plan.layout.specs[index].name, float(fractions[index])) for index in order if changed[index]]
    whole = (compared == plan.layout.shapes.prod(axis=1)) & (compared > 0)
    bins = np.bincount(np.searchsorted(CHANGE_LIMITS, fractions[whole]), minlength=len(CHANGE_LIMITS))
    return int((whole & (changed == 0)).sum()), most, bins.tolist() if whole.any() else []
