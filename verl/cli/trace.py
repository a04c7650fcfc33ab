"""`verl-sync trace`: the timeline of a run in the trace event format, which Perfetto and chrome://tracing read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from verl import __version__
from verl.checkpoint_engine.support import records
from verl.cli.look import SETTINGS, Command
from verl.cli.run_files import read_run, write_beside
from verl.cli.tracks import GROUPS, Slice, Timeline, timeline


@click.command(cls=Command, context_settings=SETTINGS)
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write; default: DIR/trace.json.",
)
def command(directory: Path, output: Path | None) -> None:
    """The timeline and the syncs of a run, for ui.perfetto.dev.

    DIR is the output directory of a run, which may still go on. Every member has a track; a sync is unfolded into its
    phases. The file is opened in https://ui.perfetto.dev, which sends it nowhere, or in chrome://tracing.
    """
    run = read_run(directory)
    output = output or directory / "trace.json"
    events = list(trace_events(timeline(run)))
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"run": run.name, "written by": f"verl-sync {__version__}"},
    }
    write_beside(run, output, records.encoded(trace).decode())
    click.echo(
        f"{output}: {sum(event['ph'] == 'X' for event in events)} slices, to be opened in https://ui.perfetto.dev"
    )


def trace_events(shown: Timeline) -> Iterator[dict[str, Any]]:
    """Events with a process per group of tracks, a thread per track. Times: microseconds since the run's begin."""
    for number, group in enumerate(GROUPS, start=1):
        if any(track.group == group for track in shown.tracks):
            yield _named("process_name", pid=number, tid=0, name=group)
            yield _named("process_sort_index", pid=number, tid=0, sort_index=number)
    for tid, track in enumerate(shown.tracks, start=1):
        pid = GROUPS.index(track.group) + 1
        yield _named("thread_name", pid=pid, tid=tid, name=track.name)
        yield _named("thread_sort_index", pid=pid, tid=tid, sort_index=tid)
        for one in track.slices:
            yield _complete(one, pid=pid, tid=tid, category=track.group)


def _named(kind: str, *, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _complete(one: Slice, *, pid: int, tid: int, category: str) -> dict[str, Any]:
    args = {name: value for name, value in one.details.items() if value not in (None, "")}
    if one.version is not None:
        args["version"] = one.version
    return {
        "ph": "X",
        "name": one.name,
        "cat": category,
        "ts": one.start_ns / 1000,
        "dur": (one.stop_ns - one.start_ns) / 1000,
        "pid": pid,
        "tid": tid,
        "args": args,
    }
