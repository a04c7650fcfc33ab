"""`verl-sync watch`: follows a run, with a live page or lines in a terminal."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from aiohttp import web
from rich.console import Console

from verl.checkpoint_engine.support import records
from verl.checkpoint_engine.support.console import is_live
from verl.cli.incidents import incidents
from verl.cli.look import SETTINGS, Command, Unusable
from verl.cli.report import DIRECTORY, page
from verl.cli.report_data import about, report_data
from verl.cli.run_files import WATCHED, RunFiles, read_run
from verl.cli.samples import decoder, directories_below, read_samples, sample_directories
from verl.trainer.output_lock import NAME as RUNNING
from verl.trainer.output_lock import is_written
from verl.utils.console import step_line

SECONDS = 1.0
"""The interval at which the files of a run are checked."""
SAMPLED_STEPS, SAMPLES = 5, 8
ALIVE_SECONDS = 15.0
"""The interval of signs of life from the server to a page without changes."""
LOOPBACK = "127.0.0.1"


@click.command(cls=Command, context_settings=SETTINGS)
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@click.option("--text", is_flag=True, help="Lines in this terminal instead of a page; ends with the run.")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port of the page; default: any that is free.")
@click.option(
    "--host",
    default=LOOPBACK,
    show_default=True,
    help="Address at which the page is served. Whoever has the printed link may read the run.",
)
def command(directory: Path, text: bool, port: int, host: str) -> None:
    """Follow a run: the page of `report`, live, or lines.

    DIR is the output directory of a run that goes on, or of one that is over. The page follows the run's files; its
    link has a token, without which the server answers nobody. Ctrl-C ends the server, and leaves the run alone.
    """
    run = read_run(directory)
    if text and (port or host != LOOPBACK):
        raise click.UsageError("--port and --host are of the page, which --text does not serve.")
    if text:
        for line in _lines(run, lambda: read_run(directory), wait=lambda: time.sleep(SECONDS)):
            click.echo(line)
        return
    asyncio.run(served(Watched(directory), host, port))


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The state of a run's files at one moment: their sizes and times."""

    stamp: tuple[Any, ...]
    data: bytes
    """The result of `report_data` in JSON."""


@dataclass
class Watched:
    """The data of a run's page, read again when its files have changed. Keeps only the latest data."""

    directory: Path
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    _seen: Seen | None = None
    _places: Sequence[Path] = ()
    """Where samples were when the files were read."""

    def stamp(self) -> tuple[Any, ...]:
        """A value that changes with the run's files."""
        paths = [self.directory / name for name in (*WATCHED, RUNNING)]
        paths += [path for each in self._sampled() for path in sorted(each.glob("*.jsonl"))[-1:]]
        found = ((path, path.stat()) for path in paths if path.exists())
        return tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found)

    def _sampled(self) -> list[Path]:
        return list(dict.fromkeys((*directories_below(self.directory), *self._places)))

    def data(self) -> bytes:
        stamp = self.stamp()
        if self._seen is None or self._seen.stamp != stamp:
            run = read_run(self.directory)
            decode = decoder(None, run)
            directories = self._places = sample_directories(run)
            shown = read_samples(directories, steps=SAMPLED_STEPS, per_step=SAMPLES, decode=decode)
            data = report_data(run, shown) | {"decoded": decode is not None, "goes_on": is_written(run.directory)}
            self._seen = Seen(stamp=stamp, data=records.encoded(data | {"token": self.token}))
        return self._seen.data


def application(watched: Watched) -> web.Application:
    """Serves the page at `/`, its data at `/data`, and notices of changes at `/events`, each only to clients with the
    token."""

    def guarded(answer: Callable[[web.Request], Any]) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            if not hmac.compare_digest(request.query.get("token", "").encode(), watched.token.encode()):
                raise web.HTTPForbidden(text="this link needs the token that verl-sync watch has printed\n")
            found: web.StreamResponse = await answer(request)
            return found

        return handle

    async def show(_: web.Request) -> web.Response:
        text = page(json.loads(await asyncio.to_thread(watched.data)), live=True)
        return web.Response(text=text, content_type="text/html", headers={"Referrer-Policy": "no-referrer"})

    async def data(_: web.Request) -> web.Response:
        return web.Response(body=await asyncio.to_thread(watched.data), content_type="application/json")

    async def events(request: web.Request) -> web.StreamResponse:
        last, heard = await asyncio.to_thread(watched.stamp), time.monotonic()
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await stream.prepare(request)
        while True:
            await asyncio.sleep(SECONDS)
            now = await asyncio.to_thread(watched.stamp)
            if now != last:
                await stream.write(b"data: changed\n\n")
            elif time.monotonic() - heard > ALIVE_SECONDS:
                await stream.write(b": still here\n\n")
            else:
                continue
            last, heard = now, time.monotonic()

    app = web.Application()
    app.add_routes([web.get(path, guarded(each)) for path, each in (("/", show), ("/data", data), ("/events", events))])
    return app


async def served(watched: Watched, host: str, port: int) -> None:
    """Serve until the task is cancelled. Raises Unusable if the port is in use."""
    runner = web.AppRunner(application(watched), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as exc:
        raise Unusable(f"--host {host} --port {port}: {exc.strerror}") from exc
    served = runner.addresses[0]
    name = f"[{served[0]}]" if ":" in served[0] else served[0]
    click.echo(f"http://{name}:{served[1]}/?token={watched.token}")
    click.echo(f"follows {watched.directory}; Ctrl-C ends this, not the run", err=True)
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _lines(run: RunFiles, read: Callable[[], RunFiles], wait: Callable[[], None]) -> Iterator[str]:
    """What the run is, its steps so far, and each one that comes, until the run is over."""
    console = Console(file=sys.stdout)
    width = console.width if is_live(console) else 80
    yield from (f"{name}: {text}" for name, text in about(run))
    told_steps, told_incidents, total = 0, 0, _total(run)
    while True:
        goes_on = is_written(run.directory)
        for record in run.metrics[told_steps:]:
            measured = {name: value for name, value in record.items() if isinstance(value, (int, float))}
            yield from step_line(measured, int(measured.get("step", 0)), total, width).splitlines()
        found = incidents(run.reports, run.metrics)
        yield from (f"step {one.step}: {one.what}: {one.text}" for one in found[told_incidents:])
        told_steps, told_incidents = len(run.metrics), len(found)
        if not goes_on:
            yield "the run is over"
            return
        wait()
        run = read()


def _total(run: RunFiles) -> int | None:
    steps = run.starts[-1].get("total_steps") if run.starts else None
    return steps if isinstance(steps, int) else None
