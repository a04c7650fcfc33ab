"""What happens when a process of a replica is killed, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from ray.exceptions import RayActorError

from tests.checkpoint_engine.fakes import soon
from tests.processes import wait_until_gone
from tests.sglang_on_cpu import NEEDS_SGLANG
from tests.workers.rollout.broken_answers import (
    GREEDY,
    PROMPTS,
    Broken,
    assert_log_probs_are_of_their_versions,
    assert_they_go_on_as_if_nothing_had_happened,
)
from tests.workers.rollout.conftest import MAX_MODEL_LEN, PROMPT, Served, Trainer
from verl.checkpoint_engine.engines.leftovers import shared_memory_of
from verl.workers.rollout import Placement, RolloutMode, RolloutReplica, launch_all
from verl.workers.rollout.errors import ReplicaDied, RolloutError
from verl.workers.rollout.written_calls import CallDirectory

MIDDLE = """
import multiprocessing, time
from verl.checkpoint_engine.engines.vllm.plugin import end_with_parent

def child():
    end_with_parent()
    end_with_parent()  # vLLM may load its plugins twice
    print(multiprocessing.current_process().pid, flush=True)
    time.sleep(100)

if __name__ == "__main__":
    end_with_parent()
    multiprocessing.get_context("spawn").Process(target=child, daemon=True).start()
    time.sleep(100)
"""


async def server_process(replica: RolloutReplica) -> psutil.Process:
    return psutil.Process(await replica.server_handle.pid.remote())


async def assert_dead_soon(replica: RolloutReplica, words: str = "") -> None:
    """Said with these words, and no call hangs."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            await asyncio.wait_for(replica.health(), 60)
        except ReplicaDied as exc:
            assert replica.name in str(exc)
            assert words in str(exc)
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"{replica.name} is still said to be healthy")


def test_an_engine_process_ends_when_its_client_is_killed(tmp_path):
    script = tmp_path / "middle.py"
    script.write_text(MIDDLE)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as middle:
        child = psutil.Process(int(middle.stdout.readline()))
        middle.kill()
        middle.wait()
        left = wait_until_gone([child])
        for process in left:
            process.kill()
    assert left == []


@pytest.mark.parametrize("written", [True, False])  # by a server on this host; else it is asked
async def test_answers_of_a_killed_server_go_on_at_another_one_with_the_version_of_every_token(
    ray_cluster: None, make_replica: Callable[..., RolloutReplica], trainer: Trainer, written: bool
):
    """The second version came to the first server in the middle of them, and never to the other one."""
    one, two = make_replica("hf", 5), make_replica("hf", 6)
    await launch_all(one.init_standalone(), two.init_standalone())

    async def update() -> None:
        trainer.commit(2)
        await one.activate(trainer.arena_path, 2)

    try:
        for replica in (one, two):
            await Served(replica, trainer).serve(1)
        with closing(CallDirectory()) as directory:
            broken = Broken(one, two, directory if written else None)
            await broken.begin(update)
            await broken.kill()
            outputs = await broken.answers()
    finally:
        await asyncio.gather(one.shutdown(), two.shutdown())
    went_on = [[(span.replica, span.version) for span in output.weight_versions] for output in outputs]
    assert sorted(went_on) == [
        *[[("replica-5", 1), ("replica-5", 2), ("replica-6", 1)]] * 2,
        *[[("replica-6", 1)]] * 2,
    ]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert len(output.token_ids) == GREEDY.max_tokens
        assert_log_probs_are_of_their_versions(trainer, prompt, output)


async def test_a_killed_server_is_found_out_and_a_new_one_takes_its_place(
    ray_cluster: None, make_replica: Callable[..., RolloutReplica], trainer: Trainer
):
    replica = make_replica("hf", 7)
    served = Served(replica, trainer)
    replica.begin_server(RolloutMode.STANDALONE, Placement())
    begun = await replica.server_handle.pid.remote()
    await replica.init_standalone()
    assert await replica.server_handle.pid.remote() == begun  # the engine is in the server that had begun
    try:
        await served.serve(1)
        await replica.pause("keep")
        parked = served.submit()
        (await server_process(replica)).kill()
        with pytest.raises(RayActorError):
            await parked
        await assert_dead_soon(replica)
        await replica.launch_servers()
        await served.serve(1)
        assert len((await served.generate(max_tokens=3, ignore_eos=True)).token_ids) == 3
    finally:
        await replica.shutdown()
    await replica.shutdown()


@pytest.mark.vllm
async def test_killing_any_process_of_vllm_ends_all_of_it_and_leaves_the_other_replica_alone(
    ray_cluster: None, make_replica: Callable[..., RolloutReplica], trainer: Trainer, temporary: Path
):
    """Two replicas, started together: one on one rank, one on two ranks."""
    counting = {"engine_kwargs": {"vllm": {"disable_log_stats": False}}}
    one, two = make_replica("vllm", 8, **counting), make_replica("vllm", 9, tensor_model_parallel_size=2, **counting)
    leave_files_in(temporary, one, two)
    await launch_all(one.init_standalone(), two.init_standalone())
    try:
        for served in (Served(one, trainer), Served(two, trainer)):
            await served.serve(1)
            output = await served.generate(max_tokens=12, temperature=0.0, ignore_eos=True)
            assert output.log_probs == pytest.approx(
                trainer.log_probs(1, [3, 4, 5, 6], output.token_ids, 1.0), abs=2e-4
            )

        assert left_in(temporary)
        killed = await assert_they_go_on_as_if_nothing_had_happened(one, two, trainer)
        assert len(killed) > 1
        assert wait_until_gone(killed) == []
        await assert_dead_soon(one)
        await two.health()

        served = Served(two, trainer)
        begun = served.submit(max_tokens=MAX_MODEL_LEN - 10, ignore_eos=True)
        seeded = served.submit(max_tokens=MAX_MODEL_LEN - 10, ignore_eos=True, seed=1)
        await served.generate(max_tokens=5, ignore_eos=True)
        await two.pause("keep")  # with the two that began earlier, and a third that has not begun
        parked = served.submit()
        await asyncio.sleep(0.2)
        server = await server_process(two)
        names = {process: process.name() for process in server.children(recursive=True)}
        workers = {name: process for process, name in names.items() if "Worker" in name}
        assert len(workers) == 2, names
        killed = workers[max(workers)]
        killed.kill()
        died = f"the engine died: its worker 1 (pid {killed.pid}) was ended by SIGKILL"
        await assert_dead_soon(two, died)
        for request in (parked, seeded):  # one with a seed is drawn again as a whole
            with pytest.raises(ReplicaDied, match=re.escape(died)):
                await asyncio.wait_for(_wait(request), 120)
        output = await asyncio.wait_for(_wait(begun), 120)
        assert output.stop_reason == "died"  # so it is continued on another engine
        assert 5 <= len(output.token_ids) < MAX_MODEL_LEN - 10
        assert output.log_probs == pytest.approx(trainer.log_probs(1, PROMPT, output.token_ids, 1.0), abs=2e-4)
        assert [(span.stop, span.version) for span in output.weight_versions] == [(len(output.token_ids), 1)]
        children = server.children(recursive=True)
    finally:
        await asyncio.gather(one.shutdown(), two.shutdown())
    assert wait_until_gone([server, *children]) == []
    assert soon(lambda: not left_in(temporary)), left_in(temporary)


def schedulers_of(server: psutil.Process) -> list[psutil.Process]:
    """By the title that SGLang gives them, of which the system's name of a process has the first 15 characters."""
    children = server.children(recursive=True)
    return [child for child in children if "sglang::sched" in " ".join([child.name(), *child.cmdline()])]


@pytest.mark.sglang
@NEEDS_SGLANG
async def test_killing_a_scheduler_of_sglang_ends_all_of_it_and_leaves_nothing(
    ray_cluster: None, make_replica: Callable[..., RolloutReplica], trainer: Trainer, temporary: Path
):
    replica = make_replica("sglang-on-cpu", 12)
    leave_files_in(temporary, replica)
    served = Served(replica, trainer)
    await replica.init_standalone()
    try:
        await served.serve(1)
        await replica.pause("keep")
        parked = served.submit()
        await asyncio.sleep(0.2)
        server = await server_process(replica)
        children, memory = server.children(recursive=True), shared_memory_of(server.pid)
        assert left_in(temporary)
        if not soon(lambda: len(schedulers_of(server)) == 1):
            pytest.skip(f"SGLang's processes have no titles: {[process.cmdline() for process in children]}")
        schedulers_of(server)[0].kill()
        await assert_dead_soon(replica)
        with pytest.raises(
            Exception, match="died|unavailable"
        ):  # said by the server, unless SGLang has ended that, too
            await asyncio.wait_for(_wait(parked), 120)
    finally:
        await replica.shutdown()
    assert wait_until_gone([server, *children]) == []
    assert memory
    assert soon(lambda: not any(path.exists() for path in memory)), memory
    assert soon(lambda: not left_in(temporary)), left_in(temporary)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Of the servers of one test; its path is short, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="death-") as directory:
        yield Path(directory)


def leave_files_in(directory: Path, *replicas: RolloutReplica) -> None:
    for replica in replicas:
        variables = replica.env_vars() | {"TMPDIR": str(directory)}
        replica.env_vars = lambda variables=variables: variables


def left_in(directory: Path) -> list[Path]:
    return [*directory.glob("verl-engine-*"), *directory.glob("vllm_dist_*")]


@pytest.mark.vllm
@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_engine_that_does_not_start_leaves_nothing(
    ray_cluster: None,
    make_replica: Callable[..., RolloutReplica],
    tiny_models: dict[int, Path],
    tmp_path: Path,
    temporary: Path,
    ranks: int,
):
    """It fails when its ranks have met: the weights are cut short."""
    broken = shutil.copytree(tiny_models[1], tmp_path / "model")
    (weights,) = broken.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size // 2)
    replica = make_replica("vllm", 10 + ranks, tensor_model_parallel_size=ranks, load_format="auto")
    replica.model = replace(replica.model, path=str(broken))
    leave_files_in(temporary, replica)
    with pytest.raises(RolloutError, match="did not start"):
        await replica.init_standalone()
    await replica.shutdown()
    assert soon(lambda: not left_in(temporary)), left_in(temporary)


async def _wait(ref: object) -> object:
    return await ref
