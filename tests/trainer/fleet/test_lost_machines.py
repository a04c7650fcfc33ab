"""Rollouts whose machine is gone. What there is of Ray is a list of machines; nodes and engines are remembered."""

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from verl.checkpoint_engine.errors import CheckpointEngineError, ConfigError, TransportError
from verl.trainer.fleet import lost_machines
from verl.trainer.fleet.lost_machines import LostMachines
from verl.trainer.fleet.placement import Machine
from verl.workers.config import PPOConfig

TRAINER, FIRST, SECOND, SPARE = "trainer", "first", "second", "spare"


class Nodes:
    """Node i is on the i-th of `machines`; none can be on one that is `unfit`."""

    def __init__(self, machines, unfit):
        self.machines = dict(enumerate(machines))
        self.hosts = {index: f"host of {name}" for index, name in self.machines.items()}
        self.unfit = unfit

    def port(self, index):
        return SimpleNamespace(name=f"node-{index}")

    async def move(self, machines, hosts):
        self.machines |= machines
        self.hosts |= hosts
        return {index: ConfigError("no room") for index, name in machines.items() if name in self.unfit}

    def give_up(self, indices):
        for index in indices:
            del self.machines[index], self.hosts[index]
        return [self.port(index) for index in indices]


class Pool:
    """A replica on each node."""

    def __init__(self, nodes):
        self.replicas = [SimpleNamespace(name=f"replica-{index}", node_index=index) for index in nodes]

    async def move(self, machines):
        return [replica.name for replica in self.replicas if replica.node_index in machines]

    async def give_up(self, nodes):
        lost = [replica for replica in self.replicas if replica.node_index in nodes]
        self.replicas = [replica for replica in self.replicas if replica not in lost]
        return [replica.name for replica in lost]


class Manager:
    def __init__(self, late_nodes):
        self.late_nodes, self.fails = late_nodes, None
        self.joined, self.removed = [], []

    async def add_nodes(self, ports):
        self.joined += [port.name for port in ports]
        if self.fails:
            raise self.fails

    async def remove_nodes(self, ports):
        self.removed.append([port.name for port in ports])


class Run:
    def __init__(self, *machines, late_nodes=True, unfit=(), restart_wait_s=0.05):
        self.there = {TRAINER, *machines}
        self.nodes = Nodes(machines, unfit)
        self.pool, self.manager = Pool(self.nodes.machines), Manager(late_nodes)
        trainer = replace(PPOConfig().trainer, placement="separate", restart_wait_s=restart_wait_s)
        of_one_replica = PPOConfig().actor_rollout_ref.rollout.replica_ranks
        self.lost = LostMachines(
            replace(PPOConfig(), trainer=trainer),
            "cuda",
            machines=lambda: {
                name: Machine(address=f"host of {name}", cpus=8, accelerators=of_one_replica)
                for name in sorted(self.there)
            },
            trainer_nodes=lambda: [TRAINER],
            nodes=lambda: self.nodes,
            pool=self.pool,
            manager=lambda: self.manager,
        )


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(lost_machines, "LOOKS_EVERY_S", 0.01)


async def test_nothing_happens_while_all_are_there():
    run = Run(FIRST, SECOND)
    assert await run.lost.leave() == 0
    assert run.manager.removed == []


async def test_they_go_on_on_a_machine_that_is_free_and_get_the_version_in_service_there(caplog):
    run = Run(FIRST, SECOND)
    run.there = {TRAINER, SECOND, SPARE}
    assert await run.lost.leave() == 2
    assert run.nodes.machines == {0: SPARE, 1: SECOND}
    assert run.manager.joined == ["node-0"]
    assert [record.getMessage() for record in caplog.records] == [
        "host of first is lost; node-0, replica-0 go on on host of spare"
    ]


@pytest.mark.parametrize("late_nodes", [True, False])
async def test_where_the_version_cannot_be_brought_alone_the_next_sync_connects_anew_and_brings_one(late_nodes, caplog):
    caplog.set_level(logging.INFO)
    run = Run(FIRST, late_nodes=late_nodes)
    run.manager.fails = TransportError("nobody has it")
    run.there = {TRAINER, SPARE}
    assert await run.lost.leave() == 2
    assert run.manager.removed == [[]]
    assert ("get a version with the next sync: nobody has it" in caplog.text) == late_nodes


async def test_those_for_whom_there_is_no_machine_leave_the_run(caplog):
    run = Run(FIRST, SECOND)
    run.there = {TRAINER, SECOND}
    assert await run.lost.leave() == 2
    assert run.nodes.machines == {1: SECOND}
    assert run.manager.removed == [["node-0"]]
    assert "host of first is lost; the run goes on without node-0, replica-0" in caplog.text


async def test_so_do_those_that_cannot_be_on_the_machine_that_there_is(caplog):
    run = Run(FIRST, SECOND, unfit=[SPARE])
    run.there = {TRAINER, SECOND, SPARE}
    assert await run.lost.leave() == 2
    assert run.nodes.machines == {1: SECOND}
    assert "node-0 cannot be on host of spare: no room" in caplog.text
    assert "host of first is lost; the run goes on without node-0, replica-0" in caplog.text


async def test_when_no_machine_is_left_another_one_is_waited_for(caplog):
    run = Run(FIRST, restart_wait_s=60.0)
    run.there = {TRAINER}
    leaving = asyncio.ensure_future(run.lost.leave())
    await asyncio.sleep(0.1)
    run.there.add(SPARE)
    assert await leaving == 2
    assert run.nodes.machines == {0: SPARE}
    assert caplog.text.count("no machine is left for rollouts: waiting 60 s for one (trainer.restart_wait_s)") == 1


async def test_when_none_comes_the_run_ends():
    run = Run(FIRST, SECOND)
    run.there = {TRAINER}
    with pytest.raises(CheckpointEngineError, match="every machine with a rollout node is lost: host of first, host"):
        await run.lost.leave()
