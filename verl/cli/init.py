"""`verl-sync init`: a small project to begin with."""

from __future__ import annotations

import shlex
import sys
from importlib.resources import files
from pathlib import Path

import click

from verl.cli.look import SETTINGS, Command, Unusable

NAMES = {"gitignore": ".gitignore"}
"""Files with another name in a project."""
NEXT = (
    "cd {directory}",
    "{python} make_data.py",
    "PYTHON={python} ./train.sh",
)


@click.command(cls=Command, context_settings=SETTINGS)
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def command(directory: Path) -> None:
    """Make a small project: data, a reward with its tests, a script that trains.

    DIR is made; it may exist if it is empty. The project runs as it is, with a tiny model on two CPU cores. Its
    README.md says what to change.
    """
    if directory.is_dir() and any(directory.iterdir()):
        raise Unusable(f"{directory} is not empty: name a directory that is not there yet")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for each in files("verl.cli").joinpath("project").iterdir():
            if each.is_file():
                made = directory / NAMES.get(each.name, each.name)
                made.write_text(each.read_text(encoding="utf-8"), encoding="utf-8")
                made.chmod(0o755 if made.suffix == ".sh" else 0o644)
    except OSError as exc:
        raise Unusable(f"{directory} cannot be written: {exc.strerror}") from exc
    words = {"directory": shlex.quote(str(directory)), "python": shlex.quote(sys.executable)}
    click.echo(f"{directory} is made; {directory / 'README.md'} names its files. Next:")
    for line in NEXT:
        click.echo(f"    {line.format(**words)}")
