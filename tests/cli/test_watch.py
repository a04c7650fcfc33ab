"""`verl-sync watch`: a run that goes on, followed by a page and by lines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner

from tests.cli.chromium import browse, needs_chromium
from tests.cli.runs import write_run, write_samples
from verl.cli import watch
from verl.cli.main import cli
from verl.cli.run_files import read_run
from verl.cli.watch import Watched, application
from verl.trainer.config.loader import load_config
from verl.trainer.config.record import record_run
from verl.trainer.output_lock import NAME as RUNNING


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = write_run(tmp_path / "project" / "experiment", steps=4)
    write_samples(directory / "rollouts", 4)
    (directory / RUNNING).touch()
    return directory


@pytest.fixture
async def client(run: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    monkeypatch.setattr(watch, "SECONDS", 0.05)
    async with TestClient(TestServer(application(Watched(run, token="the token")))) as client:
        yield client


def add_step(run: Path, step: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "critic/score/mean": 0.9}) + "\n")


async def test_a_page_follows_the_files_of_a_run(run: Path, client: TestClient[web.Request, web.Application]):
    async with client.get("/events", params={"token": "the token"}) as events:
        add_step(run, 5)
        assert await events.content.readline() == b"data: changed\n"
    async with client.get("/data", params={"token": "the token"}) as answer:
        data = await answer.json()
    assert data["metrics"]["steps"] == [0, 1, 2, 3, 4, 5]
    assert data["goes_on"]
    assert len(data["samples"]) == 3


@pytest.mark.parametrize("path", ["/", "/data", "/events"])
@pytest.mark.parametrize("token", ["", "another", "the tokén"])
async def test_who_has_no_token_gets_nothing(client: TestClient[web.Request, web.Application], path: str, token: str):
    async with client.get(path, params={"token": token}) as answer:
        assert answer.status == 403
        assert "critic" not in await answer.text()


async def test_the_page_may_ask_its_own_server_and_nobody_else(client: TestClient[web.Request, web.Application]):
    async with client.get("/", params={"token": "the token"}) as answer:
        text = await answer.text()
    assert "default-src 'none'" in text
    assert "connect-src 'self'" in text
    assert "new EventSource(" in text


async def test_unchanged_files_are_read_once(run: Path, monkeypatch: pytest.MonkeyPatch):
    watched, reads = Watched(run), []
    monkeypatch.setattr(watch, "read_run", lambda path: reads.append(path) or read_run(path))
    assert watched.data() == watched.data()
    assert len(reads) == 1
    add_step(run, 5)
    watched.data()
    assert len(reads) == 2


def test_lines_are_told_once_and_end_with_the_run(run: Path):
    record_run(run, load_config(), overview=["model: /models/a"], total_steps=6)
    added = iter((5, 6))

    def wait() -> None:
        step = next(added)
        add_step(run, step)
        if step == 6:
            (run / RUNNING).unlink()

    lines = list(watch._lines(read_run(run), lambda: read_run(run), wait))
    assert lines[0] == "model: /models/a"
    assert [line.split(" |")[0] for line in lines if line.startswith("step ") and "/6" in line] == [
        f"step {step}/6" for step in range(7)
    ]
    assert "step 3: sync aborted: version 3: [version 3, stage] node-1 <gone>" in lines
    assert lines[-1] == "the run is over"


def test_a_run_that_is_over_is_told_at_once(run: Path):
    (run / RUNNING).unlink()
    done = CliRunner().invoke(cli, ["watch", "--text", str(run)])
    assert done.exit_code == 0
    assert done.output.endswith("the run is over\n")


def test_a_run_that_has_only_begun_is_followed(tmp_path: Path):
    record_run(tmp_path, load_config(), overview=["model: /models/a"])
    data = json.loads(Watched(tmp_path).data())
    assert data["about"][0] == ["model", "/models/a"]
    assert data["metrics"]["steps"] == []


def test_a_port_that_is_taken_is_one_line(run: Path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = CliRunner().invoke(cli, ["watch", str(run), "--port", str(taken.getsockname()[1])])
    assert done.exit_code == 2
    assert "in use" in done.output.splitlines()[-1]


@needs_chromium
async def test_a_browser_shows_a_step_that_comes_while_it_looks(
    run: Path, client: TestClient[web.Request, web.Application], tmp_path: Path
):
    import asyncio

    address = client.make_url("/").with_query(token="the token")

    async def add() -> None:
        for step in range(5, 40):
            add_step(run, step)
            await asyncio.sleep(0.2)

    adding = asyncio.create_task(add())
    dom = await asyncio.to_thread(browse, address, tmp_path / "profile", "--dump-dom", width=1360)
    adding.cancel()
    assert 'data-ready="true"' in dom
    assert "data-error" not in dom
