"""`verl-sync report`: a run as one HTML file, which loads no other resource."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import click

from verl.checkpoint_engine.support import records
from verl.cli.look import SETTINGS, Command
from verl.cli.report_data import comparison_data, report_data
from verl.cli.run_files import read_run, write_beside
from verl.cli.samples import decoder, read_samples, sample_directories

SCRIPTS = ("basics.js", "charts.js", "timeline.js", "tables.js", "main.js")
LIVE = "live.js"
OTHER_FORMATS = (".pdf", ".png", ".svg", ".json", ".jsonl", ".csv", ".md", ".txt")
DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(cls=Command, context_settings=SETTINGS)
@click.argument("directories", metavar="DIR...", nargs=-1, required=True, type=DIRECTORY)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write; default: DIR/report.html.",
)
@click.option(
    "--samples",
    metavar="DIR",
    multiple=True,
    type=DIRECTORY,
    help="Where trainer.rollout_data_dir or validation_data_dir wrote samples; may be given again. "
    "Default: those below DIR, and those that its config.yaml names.",
)
@click.option("--steps", default=5, show_default=True, type=click.IntRange(0), help="Show samples of the last STEPS.")
@click.option("--per-step", default=8, show_default=True, type=click.IntRange(1), help="Show so many samples of each.")
@click.option(
    "--tokenizer",
    metavar="DIR",
    type=DIRECTORY,
    help="Where a tokenizer.json is, to show tokens as text; default: that of the run's model, or of its newest "
    "checkpoint.",
)
def command(
    directories: tuple[Path, ...],
    output: Path | None,
    samples: tuple[Path, ...],
    steps: int,
    per_step: int,
    tokenizer: Path | None,
) -> None:
    """One HTML file of a run, or of several side by side.

    DIR is the output directory of a run, which may still go on. The page shows what was run, reward and metrics, where
    the time of a step goes, what every member did when, what failed and what came after it, every sync, and samples
    with the version of the weights behind each token. Of several runs it shows in which settings they differ, their
    curves over each other, and what they answered to the same prompts. It needs a browser, and no network.
    """
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise click.UsageError("a DIR is named twice: a run would be compared with itself.")
    if output is not None and output.suffix.lower() in OTHER_FORMATS:
        raise click.UsageError(f"--output {output}: what is written is HTML, name it so; a browser prints it as PDF.")
    runs = [read_run(directory) for directory in directories]
    several = len(runs) > 1
    output = output or directories[0] / ("comparison.html" if several else "report.html")
    if several and samples:
        raise click.UsageError("--samples is for one run; of several, those below each DIR are shown")
    decoders = [decoder(tokenizer, run) for run in runs]
    shown = [
        read_samples(samples or sample_directories(run), steps=steps, per_step=per_step, decode=decode)
        for run, decode in zip(runs, decoders, strict=True)
    ]
    data = comparison_data(runs, shown) if several else report_data(runs[0], shown[0])
    write_beside(runs[0], output, page(data | {"decoded": decoders[0] is not None}))
    counted = [
        f"{len(run.metrics)} steps, {len(run.reports)} syncs, {len(own)} samples"
        for run, own in zip(runs, shown, strict=True)
    ]
    click.echo(f"{output}: {'; '.join(counted)}")


def page(data: dict[str, Any], *, live: bool = False) -> str:
    """The HTML page. Only `data` comes from a run; nothing in it can end its script element.

    With `live`, the page follows a server that reports changes."""
    files = resources.files("verl.cli") / "page"
    scripts = (*SCRIPTS, LIVE) if live else SCRIPTS
    parts = {
        "title": _escaped(str(data["name"])),
        "style": (files / "report.css").read_text(encoding="utf-8"),
        "script": "\n".join((files / name).read_text(encoding="utf-8") for name in scripts),
        "connect": "'self'" if live else "'none'",
        "data": json.dumps(json.loads(records.encoded(data)), separators=(",", ":"))
        .replace("<", "\\u003c")
        .replace("&", "\\u0026"),
    }
    before, *rest = (files / "report.html").read_text(encoding="utf-8").split("/*")
    filled = [parts[name] + after for name, after in (part.split("*/", 1) for part in rest)]
    return "".join([before, *filled])


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
