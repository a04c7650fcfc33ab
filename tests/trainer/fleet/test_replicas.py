"""More or fewer replicas while a run goes on. The manager and the nodes are real; engines are remembered, not run."""

import asyncio
import logging

import pytest
import torch

from tests.checkpoint_engine.fakes import Fleet, RecordingReplica
from verl.trainer.fleet.placement import place_another
from verl.trainer.fleet.replicas import ReplicaPool
from verl.trainer.fleet.wanted_replicas import WantedReplicas
from verl.workers.rollout import Placement
from verl.workers.rollout.errors import RolloutError

WEIGHTS = {"w": torch.arange(64, dtype=torch.bfloat16)}


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what it waits for tells nobody
            await asyncio.sleep(0.01)


class Engine(RecordingReplica):
    """A replica whose engine starts when it is let, if it can."""

    def __init__(self, rank):
        super().__init__(f"replica-{rank}")
        self.replica_rank = rank
        self.placement = Placement()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.is_broken = False

    async def launch(self, place):
        await self.may_start.wait()
        if self.is_broken:
            raise RolloutError("no such device")
        self.placement, self.node_index = place, place.node_index
        self.log.append("launch")

    async def launch_servers(self):
        self.fail = lambda step: None
        self.log.append("launch")

    async def shutdown(self):
        self.log.append("shutdown")

    def kill(self):
        self.log.append("kill")


class Pool(ReplicaPool):
    """One replica in service with version 0, on two nodes of one machine."""

    def __init__(self, shm_dir):
        self.fleet = Fleet(WEIGHTS, shm_dir, nodes=2, replicas=0)
        self.made = []
        self.prepare = lambda engine: None
        first = Engine(0)
        first.placement = Placement(node_id="host")
        super().__init__(
            [first],
            make=self._new,
            launch=lambda engine, place: engine.launch(place),
            manager=lambda: self.fleet.manager,
        )

    def _new(self, rank):
        self.made.append(Engine(rank))
        self.prepare(self.made[-1])
        return self.made[-1]

    async def __aenter__(self):
        await self.fleet.manager.add_replicas(self.replicas)
        await self.fleet.manager.update_weights(0)
        return self

    async def __aexit__(self, *_):
        await self.fleet.manager.close()

    async def grow_or_shrink_to(self, count):
        await self.resize(count, {0: "host", 1: "host"})

    async def settled(self):
        await until(lambda: not self._tasks)

    @property
    def names(self):
        return [replica.name for replica in self.replicas]


async def test_a_replica_that_is_added_has_the_version_in_service_before_it_counts(tmp_path):
    async with Pool(tmp_path) as pool:
        pool.prepare = lambda engine: engine.may_start.clear()
        await pool.grow_or_shrink_to(2)
        assert pool.names == ["replica-0"]  # its engine is not up yet, and nobody waits for it
        await pool.fleet.manager.update_weights(1)
        pool.made[0].may_start.set()
        await pool.settled()
        assert pool.names == ["replica-0", "replica-1"]
        assert pool.made[0].version == 1
        assert torch.equal(pool.made[0].weights["w"], WEIGHTS["w"])
        report = await pool.fleet.manager.update_weights(2)
        assert report.replicas_updated == ("replica-0", "replica-1")


async def test_replicas_go_to_the_nodes_that_have_the_fewest(tmp_path):
    pool_places = [Placement(node_index=0, local_index=0, node_id="a"), Placement(node_index=1, node_id="b")]
    assert place_another({0: "a", 1: "b"}, pool_places) == Placement(
        node_index=0, local_index=1, local_count=2, node_id="a"
    )
    async with Pool(tmp_path) as pool:
        await pool.grow_or_shrink_to(4)
        await pool.settled()
        assert [(one.node_index, one.placement.local_index) for one in pool.made] == [(1, 1), (0, 2), (1, 3)]


async def test_a_replica_that_is_removed_ends_when_it_has_generated_what_it_was_asked_for(tmp_path):
    async with Pool(tmp_path) as pool:
        await pool.grow_or_shrink_to(2)
        await pool.settled()
        generating = asyncio.Event()
        second = pool.made[0]
        second.log.clear()
        second.fail = lambda step: generating.wait() if step == "pause" else None
        await pool.grow_or_shrink_to(1)
        assert pool.names == ["replica-0"]  # it gets no more requests
        await until(lambda: second.log == ["pause"])
        report = await pool.fleet.manager.update_weights(1)  # which does not wait for it
        assert report.replicas_updated == ("replica-0",)
        assert second.log == ["pause"]
        generating.set()
        await pool.settled()
        assert second.log == ["pause", "shutdown", "kill"]
        assert pool.everyone == pool.replicas


async def test_a_replica_that_cannot_be_started_is_named_and_the_run_goes_on_without_it(tmp_path, caplog):
    def is_broken(engine):
        engine.is_broken = True

    async with Pool(tmp_path) as pool:
        pool.prepare = is_broken
        await pool.grow_or_shrink_to(2)
        await pool.settled()
        assert pool.everyone == pool.replicas
        assert pool.made[0].log == ["kill"]
        assert (await pool.fleet.manager.update_weights(1)).replicas_updated == ("replica-0",)
        pool.prepare = lambda engine: None
        await pool.grow_or_shrink_to(2)  # asked again
        await pool.settled()
        assert pool.names == ["replica-0", "replica-1"]
    assert "replica-1 could not be added; the run goes on without it: no such device" in caplog.text


async def test_a_replica_that_is_not_wanted_any_more_before_it_is_up_is_given_up(tmp_path):
    async with Pool(tmp_path) as pool:
        pool.prepare = lambda engine: engine.may_start.clear()
        await pool.grow_or_shrink_to(3)
        await asyncio.sleep(0)
        await pool.grow_or_shrink_to(2)
        pool.made[0].may_start.set()
        await pool.settled()
        assert pool.names == ["replica-0", "replica-1"]
        assert pool.everyone == pool.replicas
        with pytest.raises(ValueError, match="at least one rollout replica, not 0"):
            await pool.grow_or_shrink_to(0)


async def test_replicas_whose_rollout_node_is_gone_leave_at_once(tmp_path):
    async with Pool(tmp_path) as pool:
        await pool.grow_or_shrink_to(2)
        await pool.settled()
        pool.prepare = lambda engine: engine.may_start.clear()
        await pool.grow_or_shrink_to(4)  # the last of them to the second node
        await asyncio.sleep(0)
        assert await pool.give_up({1}) == ["replica-1", "replica-3"]
        pool.made[1].may_start.set()
        await pool.settled()
        assert pool.names == ["replica-0", "replica-2"]
        assert pool.everyone == pool.replicas
        assert [pool.made[0].log[-1], pool.made[2].log[-1]] == ["kill", "kill"]
        assert pool.restarts == 0
        assert (await pool.fleet.manager.update_weights(1)).replicas_updated == ("replica-0", "replica-2")
        assert place_another({0: "host"}, [one.placement for one in pool.replicas]).node_index == 0


async def test_replicas_whose_rollout_node_is_elsewhere_now_are_started_there(tmp_path):
    async with Pool(tmp_path) as pool:
        await pool.grow_or_shrink_to(2)
        await pool.settled()
        pool.prepare = lambda engine: engine.may_start.clear()
        await pool.grow_or_shrink_to(4)
        await asyncio.sleep(0)
        assert await pool.move({1: "another host"}) == ["replica-1"]
        moved = pool.made[0]
        assert (moved.log[-1], moved.placement.node_id) == ("kill", "another host")
        assert pool.made[2].log[-1] == "kill"  # that was only joining
        pool.made[1].may_start.set()
        await pool.settled()
        assert pool.names == ["replica-0", "replica-1", "replica-2"]
        moved.is_dead = True

        def fail(step):
            if step == "health":
                raise RolloutError("it has not been started")

        moved.fail = fail
        assert await pool.heal() == 1
        assert "launch" in moved.log[moved.log.index("kill") :]
        assert sorted((await pool.fleet.manager.update_weights(1)).replicas_updated) == pool.names


async def test_closing_ends_also_what_is_about_to_join(tmp_path):
    async with Pool(tmp_path) as pool:
        pool.prepare = lambda engine: engine.may_start.clear()
        await pool.grow_or_shrink_to(2)
        await asyncio.sleep(0)
        await pool.shutdown()
        assert pool.made[0].log == ["kill"]
        assert pool.replicas[0].log[-1] == "shutdown"


def test_a_number_in_the_file_is_told_once_each_time_that_it_is_written(tmp_path, caplog):
    wanted = WantedReplicas(tmp_path / "num_replicas")
    assert wanted.changed() is None
    wanted.path.write_text("")  # somebody is about to
    assert wanted.changed() is None
    wanted.path.write_text("3\n")
    assert [wanted.changed(), wanted.changed()] == [3, None]
    for text in ("many", "0", "-1", "2.5"):
        wanted.path.unlink()
        wanted.path.write_text(text)
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert [wanted.changed(), wanted.changed()] == [None, None]
        assert caplog.text.count(f"holds '{text}', not a number from 1 to 99999") == 1
    wanted.path.unlink()
    wanted.path.write_text("2")
    assert wanted.changed() == 2
    assert WantedReplicas(wanted.path).changed() is None  # of the run before, in the same directory
