"""A server whose publisher is killed while it is paused serves again, with the version that it names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.free_ports import free_port
from tests.checkpoint_engine.fakes import arenas_in, soon
from tests.checkpoint_engine.publisher import killed_publisher
from tests.checkpoint_engine.publisher.killed_publisher import weights_of
from tests.checkpoint_engine.stand_in_vllm import StandIn, stand_in
from verl.checkpoint_engine import ActivationError, SyncAborted, WeightPublisher, update
from verl.checkpoint_engine.conformance.relay import Relay
from verl.checkpoint_engine.parameter_server.endpoints import ANSWERS, Endpoint
from verl.checkpoint_engine.parameter_server.rescue import Rescue
from verl.checkpoint_engine.parameter_server.update_options import parse
from verl.checkpoint_engine.parameter_server.writers import Writer, order

STEPS = ("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache", "/resume")
BEFORE_IT_LOADS = STEPS[:2]
AMID = "amid the load"
"""One rank after the other finds that it cannot go on."""


@contextmanager
def killed(step: str, *arguments: str) -> Iterator[StandIn]:
    """A server whose publisher is killed when it is asked for `step` in the second push, and has ended."""
    at = "/update_weights" if step == AMID else step
    with stand_in(2) as (vllm, url):
        pushing = [2 * STEPS.count(at)]
        lost: list[int] = []

        def lose() -> None:
            lost.append(1)
            if len(lost) <= vllm.ranks:
                raise ActivationError("the arena is gone")

        def kill(path: str) -> None:
            if path == at:
                pushing[0] -= 1
                if pushing[0] == 0:
                    os.kill(process.pid, signal.SIGKILL)
                    vllm.while_loading = lose if step == AMID else vllm.while_loading

        vllm.before = kill
        with subprocess.Popen([sys.executable, "-m", killed_publisher.__name__, url, *arguments]) as process:
            assert process.wait() == -signal.SIGKILL
        yield vllm
        assert [worker.active for worker in vllm.workers] == [False] * vllm.ranks
        with WeightPublisher({"w": torch.full((8, 3), 5.0)}, [url]) as publisher:
            publisher.push(3)
        assert (vllm.version, vllm.paused) == ("3", False)


def assert_serves(vllm: StandIn, version: str) -> None:
    assert vllm.version == version
    assert torch.equal(vllm.weights["w"], weights_of(int(version))["w"])


@pytest.mark.parametrize("step", [*STEPS, AMID])
def test_a_publisher_that_is_killed_leaves_no_server_paused(step: str, shm: Path):
    with killed(step) as vllm:
        assert soon(lambda: vllm.log[-1] != step and not vllm.paused and list(shm.glob("verl-*")) == [])
        assert_serves(vllm, "1" if step in BEFORE_IT_LOADS else "2")


def test_ranks_of_torchrun_end_when_it_is_told_to_and_leave_a_server_that_serves(shm: Path):
    """As a scheduler of jobs ends them, while the server does not answer."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), "-m"]
    with stand_in(2) as (vllm, url):

        def end(path: str) -> None:
            if path == "/update_weights" and vllm.version == "1" and process.poll() is None:
                ranks = psutil.Process(process.pid).children()
                process.terminate()
                psutil.wait_procs(ranks)

        vllm.before = end
        with subprocess.Popen([sys.executable, *launcher, killed_publisher.__name__, url]) as process:
            assert process.wait() != 0
        assert soon(lambda: not vllm.paused and list(shm.glob("verl-*")) == [])
        assert_serves(vllm, vllm.version)
        assert vllm.holders == {None}


@pytest.mark.parametrize("step", [*STEPS, AMID])
def test_a_server_of_another_host_serves_what_it_holds_or_refuses_to(step: str, shm: Path):
    """Nothing can be loaded there once the publisher is dead: the memory went with it."""
    with killed(step, "far") as vllm:
        assert soon(lambda: list(shm.glob("verl-*")) == [])
        assert vllm.paused == (step == AMID)
        if vllm.paused:
            assert vllm.version == "1"
            with pytest.raises(ActivationError, match="does not go on: a load of weights has begun and not ended"):
                vllm.respond("/resume", None)
        else:
            assert_serves(vllm, "1" if step in BEFORE_IT_LOADS else "2")


def test_what_is_left_of_a_rescue_that_was_killed_with_its_publisher_goes_with_the_next(shm: Path):
    def rescue() -> tuple[Rescue, Path]:
        made = Rescue(shm, ANSWERS, Writer.here("publisher"))
        made.pausing("http://127.0.0.1:1", "vLLM")
        root = made._root
        assert root is not None
        os.utime(root, (0, 0))
        return made, root

    dead, left = rescue()
    assert dead._process is not None
    alive, kept = rescue()
    assert left.exists()
    os.kill(dead._process.pid, signal.SIGKILL)
    assert soon(lambda: not is_running(dead._process.pid))
    newest, _ = rescue()
    assert (left.exists(), kept.exists()) == (False, True)
    for one in (dead, alive, newest):
        one.serving("http://127.0.0.1:1", "vLLM")
        one.close()
    assert list(shm.iterdir()) == []


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_update_that_is_killed_before_it_loads_leaves_no_server_paused(shm: Path):
    program = (
        f"import sys; from {Endpoint.__module__} import Endpoint as E; E(sys.argv[1], timeout_s=60).update({{}}, '2')"
    )
    with stand_in(2) as (vllm, url):
        killed = []

        def kill(path: str) -> None:
            if path == "/pause" and not killed:
                killed.append(os.kill(process.pid, signal.SIGKILL))

        vllm.before = kill
        with subprocess.Popen([sys.executable, "-c", program, url]) as process:
            assert process.wait() == -signal.SIGKILL
        assert soon(lambda: vllm.log[-1] != "/pause" and not vllm.paused and list(shm.glob("verl-*")) == [])
        assert vllm.version == "default"


@contextmanager
def killed_update(
    given: Path,
    ranks: int,
    amid: Callable[[], object] = lambda: None,
    option: str = "--checkpoint-path",
    servers: int = 1,
) -> Iterator[list[StandIn]]:
    """Servers whose `update` out of what is `given` was killed, every process of it, while workers of all of them load.
    `amid`: called then, when they are dead."""
    processes = str(ranks * servers)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", processes, "--master-port", str(free_port())]
    command = [sys.executable, *(launcher if processes != "1" else []), "-m", update.__name__, option, str(given)]
    with ExitStack() as stack:
        served = [stack.enter_context(stand_in(ranks)) for _ in range(servers)]
        num_killed: list[int] = []
        all_load = threading.Barrier(ranks * servers)

        def kill() -> None:
            if num_killed:
                return
            if all_load.wait(60) == 0:
                num_killed.append(1)
                family = [process, *psutil.Process(process.pid).children(recursive=True)]
                for one in family:
                    one.kill()
                psutil.wait_procs(family[1:])
                amid()

        for vllm, _ in served:
            vllm.while_loading = kill
        arguments = ["--inference-parallel-size", str(ranks), "--weight-version", "2"]
        with subprocess.Popen([*command, *arguments, "--endpoint", *(url for _, url in served)]) as process:
            assert process.wait() == -signal.SIGKILL
        yield [vllm for vllm, _ in served]


@pytest.mark.parametrize(("ranks", "servers"), [(1, 1), (2, 1), (1, 2)])
def test_an_update_from_another_job_that_is_killed_while_it_loads_is_made_again(
    ranks: int, servers: int, shm: Path, tmp_path: Path
):
    weights = {"w": torch.arange(24.0).view(8, 3), "one": torch.tensor(2.0)}
    file, metas = tmp_path / "files" / "model.safetensors", tmp_path / "metas"
    file.parent.mkdir()
    save_file(weights, file)
    holding = ["--checkpoint-path", str(file.parent), "--save-metas-file", str(metas)]
    with subprocess.Popen([sys.executable, "-m", update.__name__, *holding]) as holder:
        try:
            assert soon(metas.exists, timeout_s=300)
            with killed_update(metas, ranks, option="--load-metas-file", servers=servers) as served:
                for vllm in served:
                    assert soon(lambda: not vllm.paused and list(shm.glob("verl-*")) == [], timeout_s=300)  # noqa: B023
                    assert vllm.version == "2"
                    assert all(torch.equal(vllm.weights[name], tensor) for name, tensor in weights.items())
                    assert vllm.holders == {None}
        finally:
            holder.kill()


def test_what_is_made_again_is_not_made_again_again():
    def again(*arguments: str) -> list[str]:
        return parse(["--load-metas-file", "f", "--endpoint", *arguments], None, "update").again("2")

    command = again("http://h", "--pause-mode", "keep", "--skip-model-check")
    repeated = parse(command[command.index(update.__name__) + 1 :], None, "update")
    assert (repeated.endpoints, repeated.pause_mode, repeated.weight_version) == (("http://h",), "keep", "2")
    assert (repeated.skip_model_check, repeated.after_another, repeated.again("2")) == (True, True, [])
    assert parse(["--checkpoint-path", "d", "--endpoint", "http://h"], None, "update").again("2") == []


@pytest.mark.parametrize(
    ("rank", "per_host", "repeated"), [(0, 4, "http://a"), (2, 4, "http://b"), (2, 2, "http://b"), (2, 3, None)]
)
def test_each_engine_whose_ranks_are_on_one_host_is_updated_again(
    rank: int, per_host: int, repeated: str | None, monkeypatch: pytest.MonkeyPatch
):
    for name, number in {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": per_host}.items():
        monkeypatch.setenv(name, str(number))
    given = ["--load-metas-file", "f", "--endpoint", "http://a", "http://b", "--inference-parallel-size", "2"]
    command = parse(given, None, "update").again("2")
    assert command[command.index("--endpoint") + 1 :][:1] == [repeated] if repeated else command == []


def assert_loads_again(ranks: int, files: Path, shm: Path) -> None:
    weights = {"w": torch.arange(24.0).view(8, 3), "empty": torch.ones(0, 3), "one": torch.tensor(2.0)}
    parts = [dict(list(weights.items())[:1]), dict(list(weights.items())[1:])]
    files.mkdir()
    for number, part in enumerate(parts):
        save_file(part, files / f"{number}.safetensors")
    with killed_update(files, ranks) as (vllm,):
        assert soon(lambda: not vllm.paused and list(shm.glob("verl-*")) == [])
        assert vllm.version == "2"
        assert vllm.weights.keys() == weights.keys()
        assert all(torch.equal(vllm.weights[name], tensor) for name, tensor in weights.items())
        assert vllm.holders == {None}


def test_an_update_that_is_killed_while_it_loads_leaves_a_server_with_its_files(shm: Path, tmp_path: Path):
    assert_loads_again(1, tmp_path / "files", shm)


def test_an_update_of_two_ranks_that_is_killed_while_it_loads_leaves_a_server_with_its_files(shm: Path, tmp_path: Path):
    assert_loads_again(2, tmp_path / "files", shm)


@pytest.mark.parametrize("change", ["written anew", "gone"])
def test_files_that_are_not_those_of_the_update_are_not_loaded_under_its_name(change: str, shm: Path, tmp_path: Path):
    file = tmp_path / "files" / "model.safetensors"
    file.parent.mkdir()
    save_file({"w": torch.ones(8, 3)}, file)

    def amid() -> None:
        file.unlink()
        if change == "written anew":
            save_file({"w": torch.zeros(8, 3)}, file)

    with killed_update(file.parent, 1, amid) as (vllm,):
        assert soon(lambda: list(shm.glob("verl-*")) == [])
        assert (vllm.version, vllm.paused) == ("default", True)
        with pytest.raises(ActivationError, match="does not go on: a load of weights has begun and not ended"):
            vllm.respond("/resume", None)


def lose() -> None:
    raise ActivationError("the arena is gone")


def test_a_server_into_which_nothing_was_loaded_serves_what_it_had(shm: Path):
    with stand_in(2) as (vllm, url):
        with WeightPublisher({"w": torch.ones(3)}, [url]) as publisher:
            vllm.sleeps_through = True
            with pytest.raises(SyncAborted):
                publisher.push(1)
        assert soon(lambda: list(shm.glob("verl-*")) == [])
        assert (vllm.version, vllm.paused) == ("default", False)


def test_a_rescue_that_was_killed_is_started_again(shm: Path):
    with stand_in(2) as (vllm, url):
        rescue = Rescue(shm, ANSWERS, Writer.here("publisher"))
        for state in (rescue.pausing, rescue.serving, rescue.pausing):
            state(url, "vLLM")
            assert rescue._process is not None
            dead = rescue._process.pid
            os.kill(dead, signal.SIGKILL)
            assert soon(lambda dead=dead: not is_running(dead))
        rescue.pausing("http://127.0.0.1:1", "vLLM")
        vllm.paused = True
        rescue.close()
        assert soon(lambda: not vllm.paused and list(shm.glob("verl-*")) == [])


def test_a_rescue_waits_for_the_network_that_was_down_for_its_publisher_too(shm: Path):
    with stand_in(2) as (vllm, url), Relay(url, timeout_s=60) as relay:
        rescue = Rescue(shm, ANSWERS, Writer.here("publisher"))
        rescue.pausing(relay.url, "vLLM")
        vllm.paused, relay.is_down = True, True
        before = relay.num_reset
        rescue.close()
        assert soon(lambda: relay.num_reset > before)
        assert vllm.paused
        relay.is_down = False
        assert soon(lambda: not vllm.paused and list(shm.glob("verl-*")) == [])


def test_a_server_that_could_not_load_is_not_let_go_on_with_torn_weights(shm: Path):
    with stand_in(2) as (vllm, url):
        with WeightPublisher({"w": torch.ones(3)}, [url]) as publisher:
            vllm.while_loading = lose
            with pytest.raises(SyncAborted):
                publisher.push(1)
        assert soon(lambda: list(shm.glob("verl-*")) == [])
        assert (vllm.version, vllm.paused) == ("default", True)


def test_a_server_that_is_anothers_by_then_is_left_to_that(shm: Path):
    other = Writer.here("other")
    with stand_in(1) as (vllm, url), WeightPublisher({"w": torch.ones(3)}, [url]) as publisher:
        publisher.push(1)

        def taken(path: str) -> None:
            if path == "/pause":
                vllm.workers[0].ledger._claim = (other, float("inf"))

        vllm.before = taken
        with pytest.raises(SyncAborted):
            publisher.push(2)
        publisher.close()
        assert soon(lambda: list(shm.glob("verl-*")) == [])
        assert vllm.paused
        assert vllm.holders == {other}


def test_a_rescue_that_comes_late_does_not_take_back_what_another_has_loaded(shm: Path):
    """The publisher that failed is closed; the next one pushes, and is closed, too, before the rescue looks."""
    with stand_in(2) as (vllm, url):
        rescue = Rescue(shm, ANSWERS, Writer.here("publisher"))
        with WeightPublisher({"w": torch.ones(3)}, [url]) as publisher:
            publisher.push(1)
            (arena,) = (path for path in arenas_in(shm) if "publisher" in path.name)
            rescue.pausing(url, "vLLM")
            rescue.loading(url, "vLLM", str(arena), 1)
        with WeightPublisher({"w": torch.full((3,), 2.0)}, [url]) as publisher:
            publisher.push(2)
        rescue.close()
        assert soon(lambda: list(shm.glob("verl-*")) == [])
        assert (vllm.version, vllm.paused) == ("2", False)
        assert torch.equal(vllm.weights["w"], torch.full((3,), 2.0))
        assert vllm.holders == {None}


def test_who_comes_meanwhile_waits_for_the_rescue(shm: Path):
    with stand_in(2) as (vllm, url):
        claim = msgspec.json.encode(order("claim", Writer.here("publisher").rescuer())).decode()
        vllm.rpc("answer", claim)
        asked: list[str] = []

        def ends(path: str) -> None:
            asked.append(path)
            if asked.count("/collective_rpc") == 3:
                vllm.rpc("answer", claim.replace('"claim"', '"release"'))

        vllm.before = ends
        with WeightPublisher({"w": torch.ones(3)}, [url]) as publisher:
            publisher.push(1)
        assert vllm.version == "1"


def test_weights_that_a_load_has_torn_are_not_served_by_who_only_pauses(shm: Path):
    """A publisher of before has failed; the next one is killed, or gives up, before it loads."""
    with stand_in(2) as (vllm, url):
        with WeightPublisher({"w": torch.ones(3)}, [url]) as publisher:
            publisher.push(1)
        vllm.paused = True
        for worker in vllm.workers:
            worker.ledger.begin_load()
        rescue = Rescue(shm, ANSWERS, Writer.here("publisher"))
        rescue.pausing(url, "vLLM")
        rescue.close()
        assert soon(lambda: list(shm.glob("verl-*")) == [])
        with pytest.raises(ActivationError, match="is torn by a load that failed: it stays paused until one succeeds"):
            Endpoint(url, timeout_s=60).resume()
        assert vllm.paused
        with WeightPublisher({"w": torch.ones(3)}, [url]) as publisher:
            publisher.push(2)
        assert (vllm.version, vllm.paused) == ("2", False)
