"""Seconds of syncs that others have published, and of each the bytes that its mechanism sends through one device. Pure.

What a row's mechanism says decides what counts, before any number is fitted:

    broadcast   one sender at a time, or one per pipeline stage in turn, and everybody gets everything: a + N / rate
    resharded   every receiver pulls its part, senders share the work: a + max(out of a sender, into a receiver) / rate;
                non-expert weights are on every receiver under expert parallelism; "packed broadcast rest" adds 5 % of N
    delta       all senders look through the model, changes are sent: a + N / senders / rate + N * changed / rate

A rate is that of one device, times the row's network where it is stated. `a` and the rates are not negative, and are
fitted by least squares of relative errors to other rows: of the same system and mechanism if they are three or more,
else of the same mechanism in all systems whose networks are stated. Nothing is fitted to the row that is predicted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas

Floats = npt.NDArray[np.float64]

LEAST_ROWS = 3
"""To fit to, of the same system and mechanism."""
BROADCAST_REST = 0.05
"""Of the bytes: "93-98% bytes" are sent from shard to shard."""
NON_EXPERT = {"Qwen3-235B-A22B": 0.034}
"""Part of the bytes, from the model's config."""
FAMILIES = (
    ("delta", r"delta|sparse"),
    ("broadcast", r"broadcast(?! rest)|gather|nccl full|nccl dense|envelope|1 sender|checkpoint-engine"),
    ("resharded", r"reshard|p2p|nixl|rdt|rdma|xfer|shard mode"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    id: str
    system: str
    mechanism: str
    model: str
    seconds: float
    """The middle, in proportion, of a range."""
    family: str
    features: tuple[float, ...]
    """(1, GB per device over its GB/s, ...), or GB where the network is not stated."""
    has_network: bool


@dataclass(frozen=True, kw_only=True)
class Predicted:
    row: Row
    seconds: float
    fitted_rows: int
    """So many others."""
    same_system: bool
    """They are of its system and mechanism; otherwise of its mechanism in all systems."""

    @property
    def ratio(self) -> float:
        return self.seconds / self.row.seconds


def read_rows(path: Path) -> tuple[list[Row], dict[str, str]]:
    """Rows that can be used, and of the others why not. Raises OSError, ValueError for another kind of file."""
    rows, left_out = [], {}
    table = pandas.read_csv(path, dtype=str, keep_default_na=False)
    missing = {"id", "system", "mechanism", "seconds", "model_GB", "nic_GBps_per_gpu"} - set(table.columns)
    if missing:
        raise ValueError(f"{path} has no columns {', '.join(sorted(missing))}")
    for fields in table.to_dict("records"):
        row = _row(fields)
        if isinstance(row, str):
            left_out[fields["id"]] = row
        else:
            rows.append(row)
    return rows, left_out


def _row(fields: Mapping[str, str]) -> Row | str:
    number = {name: _number(fields.get(name)) for name in fields}
    nbytes, seconds = number["model_GB"], number["seconds"]
    text = f"{fields['system']} {fields['mechanism']}".lower()
    family = next((name for name, pattern in FAMILIES if re.search(pattern, text)), None)
    if family is None:
        return "another mechanism than those that are modelled"
    if not seconds:
        return "no seconds"
    if not nbytes and not number.get("wire_GB_total"):
        return "bytes are not stated"
    receivers, senders = number.get("rollout_gpus") or 0.0, number.get("trainer_gpus") or 0.0
    if family == "delta":
        changed = number.get("changed_pct")
        if not changed or not senders:
            return "how much changed, or the number of senders, is not stated"
        sizes: tuple[float, ...] = (nbytes / senders, nbytes * changed / 100)
    elif family == "broadcast":
        sizes = (nbytes,)
    else:
        if not receivers or not senders:
            return "the layout is not stated"
        sizes = (_resharded(fields, nbytes, number.get("wire_GB_total") or 0.0, senders, receivers),)
    network = number["nic_GBps_per_gpu"]
    return Row(
        id=fields["id"],
        system=fields["system"],
        mechanism=fields["mechanism"],
        model=fields["model"],
        seconds=sqrt(seconds * (number.get("seconds_hi") or seconds)),
        family=family,
        features=(1.0, *(size / (network or 1.0) for size in sizes)),
        has_network=bool(network),
    )


def _resharded(fields: Mapping[str, str], nbytes: float, wire: float, senders: float, receivers: float) -> float:
    """GB through the device that has most. Copies: data-parallel engines; one where the row does not say."""
    if wire:
        return max(wire / receivers, wire / senders)
    layout = fields.get("rollout_layout") or ""
    experts = re.search(r"EP(\d+)", layout)
    copies = re.search(r"DP(\d+)", layout)
    if experts:
        shared = NON_EXPERT.get(fields["model"], 0.0)
        into = nbytes * (shared + (1 - shared) / int(experts[1]))
    else:
        into = nbytes * (int(copies[1]) if copies else 1) / receivers
    rest = BROADCAST_REST * nbytes if "broadcast rest" in fields["mechanism"] else 0.0
    return max(into, into * receivers / senders) + rest


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


def fitted(rows: Sequence[Row]) -> Floats:
    """Coefficients of the features, none negative, with the least sum of squared relative errors."""
    features = np.array([row.features for row in rows]) / np.array([[row.seconds] for row in rows])
    best, least = np.zeros(features.shape[1]), np.inf
    for count in range(1, features.shape[1] + 1):
        for chosen in combinations(range(features.shape[1]), count):
            found, *_ = np.linalg.lstsq(features[:, chosen], np.ones(len(rows)), rcond=None)
            error = float(((features[:, chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(features.shape[1]), error
                best[list(chosen)] = found
    return best


def predicted(row: Row, known: Sequence[Row]) -> Predicted | None:
    """From `known`, without the row itself; None if there is too little to fit to."""
    others = [one for one in known if one.id != row.id and one.family == row.family]
    same = [one for one in others if (one.system, one.mechanism) == (row.system, row.mechanism)]
    same = [one for one in same if one.has_network == row.has_network]
    own_system = len(same) >= LEAST_ROWS
    if not own_system:
        same = [one for one in others if one.has_network] if row.has_network else []
    if len(same) < LEAST_ROWS:
        return None
    seconds = float(fitted(same) @ np.array(row.features))
    return Predicted(row=row, seconds=seconds, fitted_rows=len(same), same_system=own_system)
