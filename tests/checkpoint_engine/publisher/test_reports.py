"""Where ranks of SGLang answer: on this host, and on another one, over a connection of this host."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.checkpoint_engine.fakes import soon
from tests.checkpoint_engine.publisher.test_remote_node import remote, serving
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.engines.sglang.orders import Report, reports_of, write_report
from verl.checkpoint_engine.errors import ActivationError, ConfigError
from verl.checkpoint_engine.parameter_server.endpoints import AGAIN_S
from verl.checkpoint_engine.parameter_server.writers import Writer
from verl.checkpoint_engine.publisher.host_claims import HostClaims
from verl.checkpoint_engine.publisher.remote_node import ReportsThere
from verl.checkpoint_engine.publisher.reports import Reports, ReportsHere

PLACES = ("here", "there")


@asynccontextmanager
async def reports_at(place: str, shm_dir: Path) -> AsyncIterator[Reports]:
    if place == "here":
        here = ReportsHere(shm_dir)
        try:
            yield here
        finally:
            here.close()
        return
    async with serving(shm_dir) as process:
        node = remote(process.port, CheckpointEngineConfig.from_mapping({"backend": "tcp"}))
        try:
            yield ReportsThere(lambda: node)
        finally:
            await node.close()


def write(file: Path) -> None:
    file.write_text("{")


def left_in(shm_dir: Path) -> list[Path]:
    return [*shm_dir.rglob("*")]


@pytest.mark.parametrize("place", PLACES)
async def test_what_ranks_answer_is_brought_and_nothing_is_left(place: str, tmp_path: Path):
    async with reports_at(place, tmp_path) as reports:
        first, second = Path(await reports.make()), Path(await reports.make())
        assert first != second
        assert first.parent.stat().st_mode & 0o077 == 0
        for rank in range(2):
            write_report(second, rank, Report(seconds=float(rank)))
        found = reports_of(await reports.take(str(second)), 2)
        assert [found[rank].seconds for rank in range(2)] == [0.0, 1.0]
        assert second not in left_in(tmp_path)
        with pytest.raises(ActivationError, match="rank 0 of SGLang did not load it"):
            reports_of(await reports.take(str(first)), 1)
        await reports.make()  # and nobody takes it
    assert soon(lambda: left_in(tmp_path) == [])


@pytest.mark.parametrize("place", PLACES)
async def test_only_a_directory_that_was_made_for_answers_is_read_and_only_once(place: str, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    write_report(other, 0, Report())
    async with reports_at(place, tmp_path) as reports:
        made = await reports.make()
        for strange in (str(other), f"{made}/../../other", ""):
            with pytest.raises(ActivationError, match="no answers of SGLang's ranks were requested in"):
                await reports.take(strange)
        await reports.take(made)
        with pytest.raises(ActivationError, match="no answers of SGLang's ranks were requested in"):
            await reports.take(made)
    assert soon(lambda: left_in(tmp_path) == [other, other / "0.json"])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("name", "said"), [("zero.json", "cannot be read"), ("0.json", "cannot be decoded")])
async def test_what_is_no_report_is_an_error_of_the_activation(place: str, name: str, said: str, tmp_path: Path):
    async with reports_at(place, tmp_path) as reports:
        directory = await reports.make()
        write(Path(directory, name))
        with pytest.raises(ActivationError, match=said):
            reports_of(await reports.take(directory), 1)


@pytest.mark.parametrize("place", PLACES)
async def test_a_directory_that_cannot_be_made_is_an_error_of_the_activation(place: str, tmp_path: Path):
    async with reports_at(place, tmp_path / "missing") as reports:
        with pytest.raises(ActivationError, match="no directory can be made .* No such file"):
            await reports.make()


async def test_a_process_that_is_gone_before_ranks_have_answered_is_named(tmp_path: Path):
    async with serving(tmp_path) as process:
        node = remote(process.port, CheckpointEngineConfig.from_mapping({"backend": "tcp"}))
        reports = ReportsThere(lambda: node)
        directory = await reports.make()
    with pytest.raises(ActivationError, match=rf"cannot be fetched: .*127\.0\.0\.1:{process.port}"):
        await reports.take(directory)
    await node.close()
    assert soon(lambda: left_in(tmp_path) == [])


URL = "http://localhost:30000/"


@pytest.mark.parametrize("place", PLACES)
async def test_a_server_of_a_host_is_one_publishers_until_that_lets_go_of_it(place: str, tmp_path: Path):
    async with reports_at(place, tmp_path) as first, reports_at("here", tmp_path) as second:
        name = await first.claim(URL, "publisher of process 1 on a")
        assert await first.claim(URL.replace("localhost", "127.0.0.1"), "publisher of process 1 on a") == name
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        assert await first.claim("https://a/b", "first") == await first.claim("https://a:443/b/", "first")
        with pytest.raises(ConfigError, match="30000/ is written by another: the publisher of process 1 on a. Close"):
            await second.claim(URL, "second")
        await second.claim(URL.replace("30000", "30001"), "second")
        await first.release(URL)
        await second.claim(URL, "second")
        with pytest.raises(ConfigError, match="is written by another: the second"):
            await first.claim(URL, "first")
        await second.release(URL)
        await first.claim(URL, "first")
    assert soon(lambda: left_in(tmp_path) == [])


@pytest.mark.parametrize("place", PLACES)
async def test_a_claim_waits_for_a_rescue_that_has_the_server(place: str, tmp_path: Path):
    rescuer = Writer.here("publisher").rescuer().who
    async with reports_at(place, tmp_path) as reports:
        rescue = HostClaims(tmp_path)
        assert rescue.claim(URL, rescuer)
        claiming = asyncio.create_task(reports.claim(URL, "publisher of process 2 on a"))
        done, _ = await asyncio.wait([claiming], timeout=3 * AGAIN_S)
        assert not done
        rescue.close()
        assert await claiming
        with pytest.raises(ConfigError, match="is written by another: the publisher of process 2 on a"):
            rescue.claim(URL, rescuer, waits=True)
    assert soon(lambda: left_in(tmp_path) == [])


def test_a_claim_ends_with_its_process_though_that_has_forks(tmp_path: Path):
    program = (
        "import os, sys, pathlib; from verl.checkpoint_engine.publisher.host_claims import HostClaims\n"
        "claims = HostClaims(pathlib.Path(sys.argv[1])); claims.claim(sys.argv[2], 'first')\n"
        "if os.fork() == 0: sys.stdin.read(); os._exit(0)\n"
        "print(flush=True); os.kill(os.getpid(), 9)"
    )
    claims = HostClaims(tmp_path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path), URL], **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.wait() == -signal.SIGKILL
        claims.claim(URL, "second")
    claims.close()
    assert left_in(tmp_path) == []


def test_whoever_removes_a_claim_takes_none_that_was_made_meanwhile(tmp_path: Path):
    first, second = HostClaims(tmp_path), HostClaims(tmp_path)
    name = first.claim(URL, "first")
    (tmp_path / name).unlink()
    second.claim(URL, "second")
    first.forget()
    with pytest.raises(ConfigError, match="written by another: the second"):
        first.claim(URL, "first")
    second.close()
