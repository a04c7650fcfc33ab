"""The console script `verl-sync`. It imports a subcommand's modules once the subcommand is known."""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from verl import __version__
from verl.cli.look import SETTINGS, Command, Group
from verl.utils.config import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = "verl-sync"
COMPLETES = "_VERL_SYNC_COMPLETE"
"""The environment variable with which a shell's completion script requests completions."""
INTERRUPTED = 130
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, kw_only=True)
class Module:
    """A subcommand with its own command line: `main` of a module that can also be run directly."""

    name: str
    about: str
    """A description in one line."""
    is_told_its_name: bool = False
    """Whether its `main` accepts `program`, the name in its help, which differs when it is run directly."""
    starts: bool = False
    """Whether it sets up logging and signals itself."""
    completes: Callable[[str], list[str]] | None = None
    """Returns the completions of a word of its command line."""


def _keys(begun: str) -> list[str]:
    from verl.trainer.config.schema import keys

    return [f"{key}=" for key in keys() if key.startswith(begun)]


MODULES = {
    "train": Module(
        name="verl.trainer.main_ppo",
        about="Reinforcement learning of a language model, in hybrid mode.",
        starts=True,
        completes=_keys,
    ),
    "update": Module(
        name="verl.checkpoint_engine.update",
        about="Push a checkpoint directory into running inference engines.",
        is_told_its_name=True,
    ),
    "certify": Module(
        name="verl.checkpoint_engine.certify",
        about="Prove that a model's weights reach vLLM whole.",
        is_told_its_name=True,
    ),
    "mismatch": Module(
        name="verl.mismatch.command",
        about="Find where vLLM and the trainer's model first compute other numbers.",
        is_told_its_name=True,
    ),
    "serve": Module(
        name="verl.tenants.command",
        about="Serve adapters as tenants: train and sample LoRA adapters with the client of Tinker.",
        is_told_its_name=True,
    ),
    "node": Module(
        name="verl.checkpoint_engine.node",
        about="Hold memory on this host into which publishers elsewhere push weights.",
        is_told_its_name=True,
    ),
    "doctor": Module(name="verl.doctor.command", about="Look whether this host, or a Ray cluster, can run a job."),
    "plan": Module(
        name="verl.planning.command",
        about="Say what syncs of a model would move, take and need, before a cluster is there.",
    ),
}
"""Subcommands that get all words after them unchanged, `--help` too."""
COMMANDS = {
    "init": ("verl.cli.init", "Make a small project: data, a reward with its tests, a script that trains."),
    "report": ("verl.cli.report", "One HTML file of a run, or of several side by side."),
    "watch": ("verl.cli.watch", "Follow a run: the page of `report`, live, or lines."),
    "trace": ("verl.cli.trace", "The timeline and the syncs of a run, for ui.perfetto.dev."),
    "diff": ("verl.cli.diff", "Where two runs first differ."),
}
"""Subcommands that are a `click.Command` called `command` in their module. The texts here are the first lines of their
help, so that the page of all subcommands imports none of them."""


class Commands(Group):
    """Subcommands in the order of this file, each imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*MODULES, *COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in MODULES:
            return _passed_on(cmd_name, MODULES[cmd_name])
        if cmd_name in COMMANDS:
            found: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
            return found
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            ctx.fail(f"no such command: {args[0]}.{did_you_mean(args[0], known)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = {name: command.get_short_help_str(limit=200) for name, command in self.commands.items()}
        abouts = {name: module.about for name, module in MODULES.items()}
        abouts |= {name: about for name, (_, about) in COMMANDS.items()}
        with formatter.section("commands"):
            formatter.write_dl(list((abouts | own).items()))


def _passed_on(name: str, module: Module) -> click.Command:
    def run(arguments: Sequence[str]) -> None:
        from verl.checkpoint_engine.support.console import log_to_console
        from verl.checkpoint_engine.support.signals import end_when_told

        if not module.starts:
            log_to_console()
            end_when_told()
        main = importlib.import_module(module.name).main
        named = {"program": f"{PROGRAM} {name}"} if module.is_told_its_name else {}
        click.get_current_context().exit(main(list(arguments), **named) or 0)

    def complete(_context: click.Context, _param: click.Parameter, begun: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in (module.completes(begun) if module.completes else ())]

    words = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED, shell_complete=complete)
    settings: dict[str, Any] = {"ignore_unknown_options": True, "help_option_names": []}
    return Command(name, callback=run, params=[words], help=module.about, context_settings=settings)


@click.group(PROGRAM, cls=Commands, context_settings=SETTINGS)
@click.version_option(__version__, message=f"{PROGRAM} %(version)s", help="Show the version of this package.")
def cli() -> None:
    """Trains language models with reinforcement learning, and brings their weights to inference engines: verified, all
    or nothing. `verl-sync COMMAND --help` tells of each command.

    To complete words with the tab key, have ~/.bashrc (or zsh's or fish's file) say

    \b
      eval "$(verl-sync completion bash)"
    """


@cli.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script by which a shell completes words of this command."""
    completing = get_completion_class(shell)
    assert completing is not None  # click knows all of SHELLS
    click.echo(completing(cli, {}, PROGRAM, COMPLETES).source())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a subcommand, and end the process with its exit code; 2 for a mistake on the command line."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if empty := [place for place, word in enumerate(words) if not word or re.fullmatch(r"--[\w-]+=", word)]:
        after = " ".join([PROGRAM, *words[: empty[0]]])
        click.echo(f"error: the argument after `{after}` is empty: is a variable of the shell not set?", err=True)
        sys.exit(2)
    try:
        code = cli.main(words, prog_name=PROGRAM, complete_var=COMPLETES, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except click.UsageError as exc:
        where = exc.ctx.command_path if exc.ctx else PROGRAM
        click.echo(f"error: {exc.format_message()} See {where} --help", err=True)
        sys.exit(exc.exit_code)
    except click.ClickException as exc:
        click.echo(f"error: {exc.format_message()}", err=True)
        sys.exit(exc.exit_code)
    except click.Abort:
        sys.exit(INTERRUPTED)
    except OSError as exc:
        if exc.errno != errno.ENOSPC or exc.filename is not None:
            raise
        click.echo(f"error: standard output cannot be written: {exc.strerror}", err=True)
        os._exit(1)  # without another try at what is still to be written
    sys.exit(code or 0)
