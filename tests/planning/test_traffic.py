"""Planned bytes are those of a real sync: link by link, in every topology."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint_engine.fakes import ColumnShardedSource, Fleet, RowShardedSource
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import make_plan
from verl.planning.forecast import Road, Sizes, seconds
from verl.planning.hardware import UNKNOWN
from verl.planning.job import Fabric, Hosts, Job
from verl.planning.traffic import Traffic

NODES = 3


def weights() -> dict[str, torch.Tensor]:
    made = {"embedding": torch.rand(1000, 64), "odd": torch.rand(7, 33), "norm": torch.rand(5), "scale": torch.rand(())}
    return made | {f"layer.{index}": torch.rand(256, 512) for index in range(8)}


def job(*, trainers: int = 2, nodes: int = NODES, link: float = 1e9, leaf: int | None = None) -> Job:
    return Job(
        trainers=Hosts(count=1, each=trainers),
        strategy="fsdp2",
        rollouts=Hosts(count=nodes, each=1),
        rollout_tp=1,
        fabric=Fabric(host_bytes_per_s=link, hosts_per_leaf=leaf, oversubscription=4.0 if leaf else 1.0),
    )


def traffic(source: type[RowShardedSource] = RowShardedSource) -> tuple[Traffic, Sizes]:
    sources = [source(weights(), rank, 2) for rank in range(2)]
    layout = Layout.of(sources[0].specs())
    plan = make_plan(layout, [ShardTable.of(layout, one.shards()) for one in sources], block_nbytes=2**20)
    return Traffic(plan, job()), Sizes.of(plan, job())


@pytest.mark.parametrize("source", [RowShardedSource, ColumnShardedSource])
@pytest.mark.parametrize("topology", ["direct", "chain", "tree", "p2p_broadcast"])
async def test_every_link_carries_what_was_planned(
    topology: str, source: type[RowShardedSource], tmp_path: Path
) -> None:
    config = {"backend": "tcp", "topology": topology, "delta": "off"}
    hosts = ("aa", "bcd")
    async with Fleet(weights(), tmp_path, nodes=NODES, replicas=NODES, source=source, hosts=hosts, **config) as fleet:
        report = await fleet.manager.update_weights(1)
    way = traffic(source)[0].way("tcp", topology)
    planned = {(one.receiver.name, one.sender.name): one.nbytes for one in way.transfers}
    assert {(link.member, link.peer): link.nbytes for link in report.links} == planned


async def test_every_node_gets_what_was_planned_over_gloo(tmp_path: Path) -> None:
    async with Fleet(weights(), tmp_path, nodes=NODES, replicas=NODES, backend="gloo", delta="off") as fleet:
        report = await fleet.manager.update_weights(1)
    way = traffic()[0].way("gloo", "broadcast")
    received = [
        sum(one.nbytes for one in way.transfers if one.receiver.name == f"node-{node}") for node in range(NODES)
    ]
    assert sum(received) == report.members["stage"].nbytes == report.nbytes_needed


@pytest.mark.parametrize(
    ("topology", "models", "hops"), [("direct", 3, 0), ("chain", 1, 2), ("tree", 1, 1), ("p2p_broadcast", 1, 2)]
)
def test_trainers_send_so_many_models_over_so_many_hops(topology: str, models: int, hops: int):
    made, sizes = traffic()
    way = made.way("tcp", topology)
    assert sum(way.sent_nbytes[f"trainer-{rank}"] for rank in range(2)) == models * sizes.version
    assert max(way.hops.values()) == hops


def test_a_stage_takes_what_the_fullest_link_takes():
    made, sizes = traffic()
    slow, _ = UNKNOWN.rates("sockets")
    of = {name: seconds(Road.of(made.way("tcp", name), job(link=1e6)), sizes, job(link=1e6), slow, delta=False)
          for name in ("direct", "chain", "tree")}  # fmt: skip
    once = sizes.version / (1e6 * slow.wire_share)
    assert of["direct"].phases["stage"] == pytest.approx(3 * once, rel=0.1)
    assert of["direct"].bound == "link out of a trainer host"
    assert once < of["chain"].phases["stage"] < of["tree"].phases["stage"] < of["direct"].phases["stage"]
    assert of["tree"].bound == "link out of a rollout host"


def test_a_switch_that_is_oversubscribed_makes_a_stage_longer():
    made, sizes = traffic()
    slow, _ = UNKNOWN.rates("sockets")
    way = made.way("tcp", "direct")
    flat, leaves = job(link=1e6), job(link=1e6, leaf=1)
    found = seconds(Road.of(way, leaves), sizes, leaves, slow, delta=False)
    assert found.phases["stage"] > 3.5 * seconds(Road.of(way, flat), sizes, flat, slow, delta=False).phases["stage"]
    assert found.bound == "links between switches"


def test_a_job_that_cannot_be_is_refused():
    from verl.utils.config import ConfigError

    with pytest.raises(ConfigError, match="--rollout-tp 3 does not divide the 4 devices"):
        Job(trainers=Hosts(count=1, each=2), strategy="fsdp2", rollouts=Hosts(count=1, each=4), rollout_tp=3,
            fabric=Fabric(host_bytes_per_s=1.0))  # fmt: skip
