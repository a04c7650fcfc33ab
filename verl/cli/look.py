"""The style of `--help` pages: like that of `train`, with bold headings and cyan options on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

import click

WIDEST = 110
"""The most columns of a page on a terminal of any width: longer lines are hard to read."""


class Formatter(click.HelpFormatter):
    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, args, click.style("usage: ", bold=True) if prefix is None else prefix)

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':{self.current_indent}}{click.style(heading.lower(), bold=True)}\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(click.style(term, fg="cyan"), meaning) for term, meaning in rows], col_max, col_spacing)


class Context(click.Context):
    formatter_class = Formatter


SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": WIDEST}


class Unusable(click.ClickException):
    """What the command line names cannot be used: a directory without a run, a damaged file, a place that cannot be
    written. Exit code 2, as for a mistake on the command line; 1 is for what a command finds."""

    exit_code = 2


class Command(click.Command):
    context_class = Context


class Group(click.Group):
    context_class = Context
