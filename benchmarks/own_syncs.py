"""Syncs that this project has measured between namespaces of one machine, predicted by the model of `verl-sync plan`.

All hosts share two cores: what nodes digest or apply they do in turn, and what goes through sockets has one limit for
all of them. Six rates are fitted, to the rows that say so; the other rows are predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pandas

from benchmarks.synthetic_model import qwen_like_specs, rows_of
from verl.checkpoint_engine.plan.delta_choice import APPLY_S, ENCODE_S
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import SyncPlan, make_plan
from verl.planning import cost
from verl.planning.cost import Rates
from verl.planning.forecast import Road, Sizes, stage_s
from verl.planning.job import Fabric, Hosts, Job
from verl.planning.traffic import Traffic

TRAINERS, CORES = 2, 2
ENDLESS = float("inf")
START = Rates(
    copy=ENDLESS,
    digest=ENDLESS,
    encode=ENDLESS,
    apply=ENDLESS,
    to_host=ENDLESS,
    load=ENDLESS,
    wire_share=1.0,
    process=ENDLESS,
    message_s=0.0,
    tensor_s=0.0,
    call_s=0.0,
    member_s=0.0,
    threads=1,
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row. What was not told is 0: of a whole version no part has `changed`."""

    source: str
    backend: str
    topology: str
    nodes: int
    gbit_per_s: float
    mib: int
    changed: float
    publish_s: float
    stage_s: float
    total_s: float
    used: str

    @property
    def is_fitted(self) -> bool:
        return self.used == "fit"

    @property
    def rest_s(self) -> float:
        return self.total_s - self.publish_s - self.stage_s


@dataclass(frozen=True, kw_only=True)
class Fitted:
    rates: Rates
    cores_bytes_per_s: float
    """What both cores push through sockets."""


def read_measured(path: Path) -> list[Measured]:
    return [Measured(**row) for row in pandas.read_csv(path).fillna(0).to_dict("records")]


@lru_cache(maxsize=8)
def _plan(mib: int) -> SyncPlan:
    specs = qwen_like_specs(mib * 2**20, "bfloat16")
    layout = Layout.of(specs)
    held = [
        ShardTable.of(layout, [shard for shard in (rows_of(spec, rank, TRAINERS) for spec in specs) if shard.box.numel])
        for rank in range(TRAINERS)
    ]
    return make_plan(layout, held, block_nbytes=2**20)


def _job(row: Measured) -> Job:
    return Job(
        trainers=Hosts(count=1, each=TRAINERS),
        strategy="fsdp2",
        rollouts=Hosts(count=row.nodes, each=1),
        rollout_tp=1,
        fabric=Fabric(host_bytes_per_s=row.gbit_per_s * 1e9 / 8),
        changed=row.changed or None,
    )


def predict(row: Measured, fitted: Fitted) -> dict[str, float]:
    """Seconds of publish, stage and the whole sync, whose rest is digests and calls."""
    plan, job, rates = _plan(row.mib), _job(row), fitted.rates
    sizes = Sizes.of(plan, job)
    way = Traffic(plan, job).way(row.backend, row.topology)
    fraction = row.changed or 1.0
    part = cost.moved_part(fraction, sizes.word) if row.changed else 1.0
    stage, _ = stage_s(Road.of(way, job, shared_cores=True), job, rates, part, fitted.cores_bytes_per_s)
    each = replace(rates, threads=CORES / row.nodes)
    if row.changed:
        publish = cost.publish_delta_s(sizes.largest_rank, fraction, sizes.word, rates)
        stage += _apply_s(sizes, row, fitted)
        verify = 0.0
    else:
        publish, verify = cost.publish_s(sizes.largest_rank, rates), cost.verify_s(sizes.version, each)
    return {"publish_s": publish, "stage_s": stage, "total_s": publish + stage + verify + rates.call_s}


def _apply_s(sizes: Sizes, row: Measured, fitted: Fitted) -> float:
    """`cost.apply_s` of two threads, of as many nodes as share them."""
    return row.nodes * cost.apply_s(sizes.version, row.changed, sizes.word, replace(fitted.rates, threads=CORES))


def fit(rows: Sequence[Measured]) -> Fitted:
    """Each rate from the row in which it alone is unknown: link, copy, calls and digests from a sync in full to one
    node, encode and apply from one with deltas, the cores from one to several nodes over fast links."""
    full = next(row for row in rows if row.is_fitted and not row.changed and row.nodes == 1)
    delta = next(row for row in rows if row.is_fitted and row.changed)
    many = next(row for row in rows if row.is_fitted and row.nodes > 1)
    sizes = Sizes.of(_plan(full.mib), _job(full))
    link = full.gbit_per_s * 1e9 / 8
    # A node digests with both cores: of what is left of both totals the part that grows with the nodes.
    rest, rest_of_many = full.rest_s, many.rest_s
    digest_s = (rest_of_many - rest) / (many.nodes - 1)
    words = delta.changed * sizes.largest_rank / sizes.word
    rates = replace(
        START,
        wire_share=sizes.version / full.stage_s / link,
        copy=sizes.largest_rank / full.publish_s,
        digest=sizes.version / (CORES * digest_s),
        call_s=rest - digest_s,
        encode=sizes.largest_rank / (delta.publish_s - words * ENCODE_S),
    )
    part = cost.moved_part(delta.changed, sizes.word)
    left = delta.stage_s - part * sizes.version / (link * rates.wire_share)
    rates = replace(rates, apply=sizes.version / CORES / (left - delta.changed * sizes.words * APPLY_S))
    # All transfers of the row go through the same cores, which are what it waits for.
    cores = many.nodes * sizes.version / many.stage_s
    return Fitted(rates=rates, cores_bytes_per_s=cores)
