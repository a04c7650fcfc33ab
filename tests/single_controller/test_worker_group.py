"""Worker groups on a real Ray. The tests of one class share its group; those that end a group make their own."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch
from ray.util import placement_group_table

from verl.protocol import DataProto
from verl.single_controller import (
    Dispatch,
    PlacementError,
    RankInfo,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    WorkerDied,
    WorkerFailed,
    WorkerGroupClosed,
    WorkerTimeout,
    register,
    worker_group,
)
from verl.single_controller.worker_group import SILENCE_S


class KeywordError(Exception):
    """Pickles, but does not come back."""

    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


class LockedError(Exception):
    """Does not even pickle."""

    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


class StatefulError(ValueError):
    def __init__(self, message, count):
        super().__init__(message, count)
        self.count = count


RAISED = {
    "keyword": lambda: KeywordError(code=3),
    "locked": LockedError,
    "stateful": lambda: StatefulError("bad batch", 5),
    "exit": lambda: SystemExit(3),
}


class Sample(Worker):
    def __init__(self, offset=0, *, close_marker=None):
        self.offset = offset
        self.close_marker = close_marker
        self.threads = {threading.get_ident()}
        self.order = []
        self.rank_in_init = self.rank

    def close(self):
        if self.close_marker is not None:
            (self.close_marker / f"closed-{self.rank}").touch()

    @register()
    def identity(self):
        variables = {key: os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
        return self.rank_info, variables, os.environ["SAMPLE_VARIABLE"], self.rank_in_init, self.offset

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def only_zero(self):
        return self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def each(self, value):
        return value * 10 + self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def lengths(self, words):
        return [(len(word), self.rank) for word in words]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, data):
        assert len(data) == 2
        ranks = [self.rank] * len(data)
        return DataProto.from_dict(tensors={"y": data.batch["x"] * 2}, non_tensors={"rank": ranks})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def total(self, data):
        return {"sum": int(data.batch["x"].sum())}

    @register(blocking=False)
    def go_on_at(self, path):
        self.threads.add(threading.get_ident())
        wait_until(path.exists)
        return self.rank

    @register()
    def wait_for_own(self, directory):
        """Until a file of the rank's number is there."""
        wait_until((directory / str(self.rank)).exists)
        return self.rank

    @register(blocking=False)
    def record(self, number, data=None):
        self.threads.add(threading.get_ident())
        self.order.append(number)

    @register()
    def seen(self):
        self.threads.add(threading.get_ident())
        order, self.order = self.order, []
        return order, len(self.threads)

    @register()
    async def control(self):
        await asyncio.sleep(0)
        return threading.get_ident() in self.threads

    @register()
    async def ordered_control(self):
        return await self.on_rank_thread(lambda: threading.get_ident() in self.threads)

    @register()
    async def failing_control(self):
        raise LookupError("not here")

    @register()
    def fail(self, kind, rank, others_end_at=None):
        if self.rank == rank:
            raise RAISED[kind]()
        if others_end_at:
            wait_until(others_end_at.exists)

    def not_registered(self):
        return "plain"


def make_group(cls=Sample, *args, ranks=2, timeout_s=300, silence_s=SILENCE_S, env_vars=None, **kwargs):
    return RayWorkerGroup(
        resource_pool=RayResourcePool([ranks], num_cpus_per_process=0.2),
        ray_cls_with_init=RayClassWithInitArgs(cls, *args, **kwargs),
        name_prefix=cls.__name__.lower(),
        env_vars=env_vars,
        startup_timeout_s=timeout_s,
        silence_s=silence_s,
    )


@pytest.fixture(scope="module")
def group(ray_cluster):
    with make_group(Sample, 7, env_vars={"SAMPLE_VARIABLE": "set"}) as made:
        yield made


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat") as status:
        return status.read().rpartition(")")[2].split()[0] != "Z"
    return False


class TestCalls:
    def test_ranks_know_who_they_are_before_and_after_init(self, group):
        infos, variables, from_group, in_init, offsets = zip(*group.identity(), strict=True)
        assert [info.rank for info in infos] == [0, 1]
        assert in_init == (0, 1)
        assert {info.world_size for info in infos} == {info.local_world_size for info in infos} == {2}
        assert len({(info.master_addr, info.master_port) for info in infos}) == 1
        assert infos[0].master_port > 0
        assert variables[1] == {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": infos[0].master_addr,
            "MASTER_PORT": str(infos[0].master_port),
        }
        assert from_group == ("set", "set")
        assert offsets == (7, 7)

    def test_the_port_at_which_ranks_meet_is_kept_for_rank_0_from_the_start(self, group):
        port = group.identity()[0][0].master_port
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("", port))

    def test_every_dispatch_mode_reaches_the_ranks(self, group):
        assert group.only_zero() == 0
        assert group.each([1, 2]) == [10, 21]
        assert group.lengths(["a", "bb", "ccc"]) == [(1, 0), (2, 1), (3, 1)]
        assert group.total(DataProto.from_dict(tensors={"x": torch.arange(4)})) == [{"sum": 1}, {"sum": 5}]

    def test_a_batch_comes_back_whole_and_in_order(self, group):
        doubled = group.double(DataProto.from_dict(tensors={"x": torch.arange(4)}))
        assert doubled.batch["y"].tolist() == [0, 2, 4, 6]
        assert doubled.non_tensor_batch["rank"].tolist() == [0, 0, 1, 1]

    def test_a_marked_batch_is_padded_and_unpadded(self, group):
        data = DataProto.from_dict(tensors={"x": torch.arange(3)}, meta_info={"auto_padding": True})
        assert group.double(data).batch["y"].tolist() == [0, 2, 4]
        with pytest.raises(ValueError, match=r"sample.double: 3 samples do not divide over 2 ranks"):
            group.double(DataProto.from_dict(tensors={"x": torch.arange(3)}))

    def test_any_method_can_be_called_by_name(self, group):
        assert group.execute_all_sync("not_registered") == ["plain", "plain"]
        assert group.execute_rank_zero_sync("not_registered") == "plain"
        assert group.execute_all_async("not_registered").get(timeout=60) == ["plain", "plain"]
        assert group.execute_rank_zero_async("only_zero").get(timeout=60) == 0

    def test_unknown_and_unregistered_methods_are_told_apart(self, group):
        with pytest.raises(AttributeError, match=r"no method 'identiti'; meant 'identity'\?"):
            group.identiti()
        with pytest.raises(AttributeError, match="not_registered is not marked with @register"):
            group.not_registered()
        with pytest.raises(AttributeError, match="nothing_like_it"):
            group.execute_all_sync("nothing_like_it")

    def test_calls_keep_their_order_on_every_rank_whatever_the_size_of_their_arguments(self, group):
        large = DataProto.from_dict(tensors={"x": torch.zeros(4_000_000)})
        futures = [group.record(number, large if number % 4 == 0 else None) for number in range(16)]
        for future in futures:
            future.get(timeout=60)
        assert group.seen() == [(list(range(16)), 1)] * 2


class TestConcurrency:
    def test_control_calls_are_answered_while_a_plain_method_runs_and_plain_methods_share_one_thread(
        self, group, tmp_path
    ):
        waiting = group.go_on_at(tmp_path / "go")
        time.sleep(0.2)
        assert group.control() == [False, False]
        with pytest.raises(WorkerTimeout, match=r"go_on_at not done within 0.1 s on ranks \[0, 1\]; done: \[\]"):
            waiting.get(timeout=0.1)
        (tmp_path / "go").touch()
        assert waiting.get(timeout=60) == [0, 1]
        assert waiting.get() == [0, 1]
        assert group.seen() == [([], 1)] * 2

    def test_a_control_call_can_use_the_thread_of_the_plain_methods(self, group):
        assert group.ordered_control() == [True, True]

    async def test_futures_can_be_awaited(self, group, tmp_path):
        slow, quick = group.submit("go_on_at", tmp_path / "go"), group.submit("control")
        assert await quick == [False, False]
        with pytest.raises(WorkerTimeout):
            slow.get(timeout=0)
        (tmp_path / "go").touch()
        assert await slow == await slow == [0, 1]

    async def test_a_cancelled_wait_leaves_the_call_running(self, group, tmp_path):
        future = group.go_on_at(tmp_path / "go")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future, timeout=0.1)
        (tmp_path / "go").touch()
        assert await future == [0, 1]

    async def test_an_awaited_failure_is_the_worker_s_own(self, group):
        with pytest.raises(StatefulError, match="bad batch"):
            await group.submit("fail", "stateful", 0)


class TestFailures:
    def test_the_caller_gets_the_original_exception_and_the_worker_s_traceback(self, group):
        with pytest.raises(StatefulError) as caught:
            group.fail("stateful", 1)
        assert caught.value.args == ("bad batch", 5)
        assert caught.value.count == 5
        assert "fail raised StatefulError on rank 1 (pid" in caught.value.__notes__[0]
        cause = caught.value.__cause__
        assert isinstance(cause, WorkerFailed)
        assert (cause.group, cause.rank) == ("sample", 1)
        assert "raise RAISED[kind]()" in str(cause)

    @pytest.mark.parametrize(
        ("kind", "text"),
        [("keyword", "KeywordError: code 3"), ("locked", "LockedError: locked"), ("exit", "SystemExit: 3")],
    )
    def test_what_cannot_travel_arrives_as_text(self, group, kind, text):
        with pytest.raises(WorkerFailed) as caught:
            group.fail(kind, 0)
        assert text in str(caught.value)
        assert caught.value.rank == 0
        assert group.execute_all_sync("not_registered") == ["plain", "plain"]

    def test_async_methods_fail_like_plain_ones(self, group):
        with pytest.raises(LookupError, match="not here") as caught:
            group.failing_control()
        assert isinstance(caught.value.__cause__, WorkerFailed)

    def test_the_first_failure_is_reported_at_once_and_the_next_call_waits_for_the_others(
        self, group, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(worker_group, "STRAGGLER_TIMEOUT_S", 60.0)
        with pytest.raises(StatefulError):
            group.fail("stateful", 1, others_end_at=tmp_path / "end")
        assert group.control() == [False, False]
        with ThreadPoolExecutor(1) as another:
            following = another.submit(group.only_zero)
            time.sleep(0.5)
            assert not following.done()
            (tmp_path / "end").touch()
            assert following.result(60) == 0


class Collective(Worker):
    def __init__(self):
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{self.master_addr}:{self.master_port}",
            rank=self.rank,
            world_size=self.world_size,
        )

    @register()
    def all_reduce(self, times=1, pause_s=0.0):
        value = torch.tensor([self.rank + 1])
        for _ in range(times):
            torch.distributed.all_reduce(value)
            time.sleep(pause_s)
        return int(value)

    @register()
    def stuck_unless(self, rank):
        if self.rank == rank:
            raise RuntimeError("before the collective")
        torch.distributed.barrier()


class TestDeath:
    def test_a_killed_worker_ends_the_call_and_its_group_at_once(self, ray_cluster, monkeypatch):
        monkeypatch.setattr(worker_group, "LIVENESS_TIMEOUT_S", 60.0)  # however long Ray takes to know of it
        with make_group(Collective) as group:
            assert group.all_reduce() == [3, 3]
            future = group.submit("all_reduce", times=10_000, pause_s=0.01)
            time.sleep(0.2)
            pids = [process.pid for process in group.processes.values()]
            assert group.lost(60.0) == []  # they answer while they compute
            os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(WorkerDied, match=rf"'collective': rank 1 \(pid {pids[1]} on .*died during") as caught:
                future.get()
            assert (caught.value.rank, caught.value.pid) == (1, pids[1])
            wait_until(lambda: not any(map(is_running, pids)))
            with pytest.raises(WorkerGroupClosed) as closed:
                group.all_reduce()
            assert closed.value.__cause__ is caught.value
            (told,) = group.lost(0.0)
            assert re.fullmatch(rf"rank 1 \(pid {pids[1]} on .*\) died during all_reduce", told)

    def test_a_worker_that_died_or_is_stopped_is_told_without_a_call_that_fails(self, ray_cluster):
        with make_group(Collective) as group:
            pids = [process.pid for process in group.processes.values()]
            os.kill(pids[0], signal.SIGKILL)
            os.kill(pids[1], signal.SIGSTOP)
            lost = []
            # A rank that is killed does not answer, either, until Ray has noticed.
            wait_until(
                lambda: lost.append(group.lost(0.5)) or [text.endswith(" died") for text in lost[-1]] == [True, False]
            )
            died, silent = lost[-1]
            assert re.fullmatch(rf"rank 0 \(pid {pids[0]} on .*\) died", died)
            assert re.fullmatch(rf"rank 1 \(pid {pids[1]} on .*\) does not answer", silent)

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_worker_that_is_stopped_ends_the_call_though_no_other_waits_for_it(
        self, ray_cluster, tmp_path, ranks, monkeypatch
    ):
        monkeypatch.setattr("verl.single_controller.future.ALL_SILENT_S", 2.5)  # after which a second question comes
        with make_group(ranks=ranks) as group:
            group._silence_s = 1.0  # from here on: a start may take longer
            waiting = group.submit("wait_for_own", tmp_path)
            pids = [process.pid for process in group.processes.values()]
            os.kill(pids[-1], signal.SIGSTOP)
            for rank in range(ranks - 1):
                (tmp_path / str(rank)).touch()
            where = rf"rank {ranks - 1} \(pid {pids[-1]} on .*\) does not answer"
            with pytest.raises(WorkerTimeout, match=f"{where}, and is not done with wait_for_own"):
                waiting.get()
            wait_until(lambda: [bool(re.fullmatch(where, text)) for text in group.lost(0.5)] == [True])

    def test_workers_that_start_are_not_asked_whether_they_live(self, ray_cluster):
        with make_group(silence_s=0.01) as group:
            assert len(group.processes) == 2

    def test_a_worker_that_is_late_and_answers_is_waited_for(self, ray_cluster, tmp_path, monkeypatch):
        monkeypatch.setattr("verl.single_controller.future.ASKS_AFTER_S", 0.2)
        with make_group() as group:
            waiting = group.submit("wait_for_own", tmp_path)
            ask = waiting._on_silence

            def ask_and_let_it_go_on(method, unfinished):
                said = ask(method, unfinished)
                (tmp_path / "1").touch()
                return said

            monkeypatch.setattr(waiting, "_on_silence", ask_and_let_it_go_on)
            (tmp_path / "0").touch()
            assert waiting.get() == [0, 1]

    def test_a_death_is_told_while_another_worker_that_is_late_does_not_answer(
        self, ray_cluster, tmp_path, monkeypatch
    ):
        monkeypatch.setattr("verl.single_controller.future.ASKS_AFTER_S", 0.2)
        with make_group(ranks=3) as group:
            waiting = group.submit("wait_for_own", tmp_path)
            pids = [process.pid for process in group.processes.values()]
            ask = waiting._on_silence

            def ask_while_one_dies(method, unfinished):
                threading.Timer(1.0, os.kill, (pids[2], signal.SIGKILL)).start()
                return ask(method, unfinished)

            monkeypatch.setattr(waiting, "_on_silence", ask_while_one_dies)
            os.kill(pids[1], signal.SIGSTOP)
            (tmp_path / "0").touch()
            with pytest.raises(WorkerDied, match=rf"rank 2 \(pid {pids[2]} "):
                waiting.get()

    async def test_a_rank_stuck_in_a_collective_neither_hides_the_failure_nor_hangs_the_next_call(
        self, ray_cluster, monkeypatch
    ):
        with make_group(Collective) as group:
            with pytest.raises(RuntimeError, match="before the collective"):
                await asyncio.wait_for(group.submit("stuck_unless", 1), timeout=60)
            with pytest.raises(WorkerGroupClosed, match="cannot run all_reduce.*rank 0 in stuck_unless"):
                group.all_reduce()
            pids = [process.pid for process in group.processes.values()]
        wait_until(lambda: not any(map(is_running, pids)))


class Brittle(Worker):
    def __init__(self, mode):
        if self.rank == 1 and mode == "raise":
            raise StatefulError("no model", 1)
        if mode == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


class TestLifetime:
    def test_an_init_that_raises_fails_the_start_at_once(self, ray_cluster):
        with pytest.raises(StatefulError, match="no model") as caught:
            make_group(Brittle, "raise")
        assert "__init__ raised StatefulError on rank 1" in caught.value.__notes__[0]

    def test_an_init_that_dies_fails_the_start_at_once(self, ray_cluster):
        with pytest.raises(WorkerDied, match="rank 0 died during __init__"):
            make_group(Brittle, "die", ranks=1)

    def test_a_start_that_takes_too_long_says_who_is_missing(self, ray_cluster):
        with pytest.raises(WorkerTimeout, match=r"(start|__init__) not done within .* s on ranks \[0\]"):
            make_group(Brittle, "hang", ranks=1, timeout_s=3)

    def test_shutdown_closes_the_workers_and_leaves_no_process_and_no_reservation(self, group, tmp_path):
        def reservations():
            return {key for key, value in placement_group_table().items() if value["state"] != "REMOVED"}

        before = reservations()
        own = make_group(Sample, ranks=1, close_marker=tmp_path)
        assert len(reservations()) == len(before) + 1
        pids = [process.pid for process in own.processes.values()]
        assert all(map(is_running, pids))
        assert own.only_zero() == 0
        own.shutdown()
        own.shutdown()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["closed-0"]
        wait_until(lambda: not any(map(is_running, pids)))
        assert reservations() == before
        with pytest.raises(WorkerGroupClosed):
            own.only_zero()

    def test_a_class_that_is_no_worker_is_refused(self):
        with pytest.raises(TypeError, match="needs a subclass of Worker"):
            RayClassWithInitArgs(cls=dict)

    def test_a_remote_class_is_the_class_behind_it(self):
        assert RayClassWithInitArgs(cls=ray.remote(Worker)).cls is Worker
        with pytest.raises(TypeError, match=r"ray.remote\(\{'num_cpus': 3\}\).*its RayResourcePool"):
            RayClassWithInitArgs(ray.remote(num_cpus=3)(Worker))
        with pytest.raises(TypeError, match="needs a subclass of Worker"):
            RayClassWithInitArgs(ray.remote(type("Other", (), {})))

    @pytest.mark.parametrize(("use_gpu", "accelerator"), [(True, "GPU"), (False, None)])
    def test_a_pool_asks_for_gpus_when_it_is_told_to(self, use_gpu, accelerator):
        assert RayResourcePool([1], use_gpu=use_gpu, name_prefix=None).use_accelerator == accelerator

    def test_a_method_must_not_have_the_name_of_one_of_the_group(self):
        class Clash(Worker):
            @register()
            def shutdown(self): ...

        with pytest.raises(TypeError, match=r"Clash registers \['shutdown'\]"):
            make_group(Clash)

    def test_a_worker_without_a_group_is_a_world_of_one(self):
        assert Worker().rank_info == RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1)


class TestPlacement:
    def test_what_the_cluster_lacks_is_named(self, ray_cluster):
        pool = RayResourcePool([2], use_accelerator="NPU", name_prefix="actors", placement_timeout_s=0.3)
        with pytest.raises(
            PlacementError, match=r"'actors' got no place within 0.3 s: needed are 2 processes"
        ) as caught:
            pool.acquire("group")
        assert "{'CPU': 0.4, 'NPU': 1.0} each" in str(caught.value)
        assert "in total [{'CPU': 16.0, 'NPU': 0.0}]" in str(caught.value)

    def test_processes_are_on_the_node_that_was_asked_for_or_nowhere(self, ray_cluster):
        (node,) = (one["NodeID"] for one in ray.nodes())
        here = RayResourcePool([2], num_cpus_per_process=0.5, nodes=[node])
        here.place()
        assert here.placed_on == [node]
        here.acquire("group")
        here.release("group")
        with pytest.raises(PlacementError, match="'pool' got no place"):
            RayResourcePool([2], num_cpus_per_process=0.5, nodes=["f" * 56], placement_timeout_s=0.3).acquire("group")
        others = RayResourcePool(
            [1, 1], num_cpus_per_process=0.5, nodes=[None, node], distinct_nodes=True, placement_timeout_s=0.3
        )
        with pytest.raises(PlacementError, match="needed are 1 processes on one node"):
            others.acquire("group")

    def test_groups_can_share_a_pool_up_to_its_limit(self, ray_cluster):
        pool = RayResourcePool([1, 2], num_cpus_per_process=0.5, max_colocate_count=2, name_prefix="shared")
        slots = pool.acquire("actor")
        assert pool.world_size == 3
        assert [(slot.rank, slot.local_rank, slot.local_world_size) for slot in slots] == [
            (0, 0, 1),
            (1, 0, 2),
            (2, 1, 2),
        ]
        pool.acquire("ref")
        with pytest.raises(PlacementError, match="already hosts 2 worker groups and max_colocate_count=2"):
            pool.acquire("critic")
        pool.release("actor")
        pool.acquire("critic")
        pool.release("ref")
        pool.release("critic")

    @pytest.mark.parametrize("nodes", [[], [2, 0]])
    def test_a_pool_has_processes_on_every_node(self, nodes):
        with pytest.raises(ValueError, match="process_on_nodes must list"):
            RayResourcePool(nodes)

    def test_a_node_is_asked_for_with_every_entry_or_with_none(self):
        with pytest.raises(ValueError, match="nodes has 1 entries, and process_on_nodes 2"):
            RayResourcePool([1, 1], nodes=["a"])
