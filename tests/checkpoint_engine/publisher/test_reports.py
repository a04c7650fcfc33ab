"""Where ranks of SGLang answer: on this host, and on another one, over a connection of this host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.checkpoint_engine.fakes import soon
from tests.checkpoint_engine.publisher.test_remote_node import remote, serving
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.engines.sglang.orders import Report, reports_of, write_report
from verl.checkpoint_engine.errors import ActivationError
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
            with pytest.raises(ActivationError, match="no answers of SGLang's ranks were asked for in"):
                await reports.take(strange)
        await reports.take(made)
        with pytest.raises(ActivationError, match="no answers of SGLang's ranks were asked for in"):
            await reports.take(made)
    assert soon(lambda: left_in(tmp_path) == [other, other / "0.json"])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("name", "said"), [("zero.json", "cannot be read"), ("0.json", "wrote what is no report")])
async def test_what_is_no_report_is_an_error_of_the_activation(place: str, name: str, said: str, tmp_path: Path):
    async with reports_at(place, tmp_path) as reports:
        directory = await reports.make()
        write(Path(directory, name))
        with pytest.raises(ActivationError, match=said):
            reports_of(await reports.take(directory), 1)


@pytest.mark.parametrize("place", PLACES)
async def test_a_directory_that_cannot_be_made_is_an_error_of_the_activation(place: str, tmp_path: Path):
    async with reports_at(place, tmp_path / "missing") as reports:
        with pytest.raises(ActivationError, match="there is no directory .* No such file"):
            await reports.make()


async def test_a_process_that_is_gone_before_ranks_have_answered_is_named(tmp_path: Path):
    async with serving(tmp_path) as process:
        node = remote(process.port, CheckpointEngineConfig.from_mapping({"backend": "tcp"}))
        reports = ReportsThere(lambda: node)
        directory = await reports.make()
    with pytest.raises(ActivationError, match=rf"cannot be had: .*127\.0\.0\.1:{process.port}"):
        await reports.take(directory)
    await node.close()
    assert soon(lambda: left_in(tmp_path) == [])
