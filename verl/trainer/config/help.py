"""The page behind `python -m verl.trainer.main_ppo --help`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from verl.trainer.config.schema import Section, documented_sections, yaml_text
from verl.utils.config import ConfigError, did_you_mean

USAGE = (
    "python -m verl.trainer.main_ppo [key=value ...] [--config-name NAME] [--config-path DIR] [--cfg job] "
    "[--check] [--supervised] [--help [SECTION ...]] [--version]"
)
ABOUT = (
    "Trains a language model with reinforcement learning: PPO-family advantages, a sharded trainer, a rollout engine, "
    "and verified weight synchronisation between them. With no argument: a built-in model on built-in problems."
)
EXAMPLES = (
    ("the built-in job", ""),
    (
        "a short one",
        "trainer.total_training_steps=5 data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=16",
    ),
    (
        "your own model and data",
        "actor_rollout_ref.model.path=/models/qwen data.train_files=train.parquet data.val_files=val.parquet",
    ),
    ("your own reward function", "custom_reward_function.path=reward.py custom_reward_function.name=compute_score"),
    ("your own YAML file", "--config-path=. --config-name=my_run trainer.resume_mode=disable"),
)
FLAGS = (
    ("--cfg job", "print the composed configuration and stop (--package KEY: one section; --resolve: interpolations)"),
    ("--check", "check configuration, model and data, describe the run, and start nothing"),
    ("--supervised", "start the command again when it dies, from its newest checkpoint, trainer.max_restarts times"),
    ("--config-name NAME", "YAML file to start from, without .yaml; it may say `defaults: [ppo_trainer, _self_]`"),
    ("--config-path DIR", "directory of that file; --config-dir DIR: one more directory to search"),
    ("--help [SECTION ...]", "this page, or the keys below some sections: --help trainer"),
    ("--version", "the version of this package"),
)
REFERENCE = "Every key with its type and meaning: docs/configuration.md"


def print_help(console: Console | None = None, sections: Sequence[str] = ()) -> None:
    """Write the page to stdout: tables on a terminal, one key per line where output is piped.

    With `sections` only those and their subsections. Raises ConfigError for an unknown section.
    """
    console = console or Console()
    chosen = _chosen(sections)
    if console.is_terminal:
        _rich_page(console, chosen, whole=not sections)
    else:
        console.print(Text(plain_page(sections)), soft_wrap=True)


def _chosen(paths: Sequence[str]) -> list[Section]:
    found = [each for each in documented_sections() if not paths or any(_below(each.path, path) for path in paths)]
    for path in paths:
        if not any(_below(each.path, path) for each in documented_sections()):
            known = [each.path for each in documented_sections() if each.path]
            raise ConfigError(f"--help {path}: no such section.{did_you_mean(path, known)}")
    return found


def _below(path: str, section: str) -> bool:
    return path == section or path.startswith(f"{section}.")


def plain_page(sections: Sequence[str] = ()) -> str:
    lines: list[str] = []
    if not sections:
        lines += [f"usage: {USAGE}", "", ABOUT, "", "examples:"]
        lines += [f"  {_command(arguments)}    # {what}" for what, arguments in EXAMPLES]
        lines += ["", "options:", *(f"  {flag:<20} {meaning}" for flag, meaning in FLAGS)]
        lines += ["", REFERENCE, "", "keys:"]
    for section in _chosen(sections):
        lines += ["", f"{section.path}: {section.doc}"]
        lines += [f"  {key.path}={yaml_text(key.default)}    {key.help_with_allowed}" for key in section.keys]
    return "\n".join(lines)


def _rich_page(console: Console, sections: Sequence[Section], *, whole: bool) -> None:
    if whole:
        _rich_beginning(console)
    for section in sections:
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(ratio=2, overflow="fold")
        table.add_column(ratio=3)
        for key in section.keys:
            name = Text.assemble((key.name, "cyan"), f"={yaml_text(key.default)}")
            table.add_row(Padding(name, (0, 0, 0, 2)), Text(key.help_with_allowed))
        console.print()
        console.print(Text.assemble((section.path, "bold"), (f"  {section.doc}", "dim")))
        console.print(table)


def _rich_beginning(console: Console) -> None:
    console.print(Text.assemble(("usage: ", "bold"), USAGE))
    console.print(Text(f"\n{ABOUT}\n"))
    console.print(Text("examples", "bold"))
    for what, arguments in EXAMPLES:
        console.print(Text(f"  {what}", "dim"))
        console.print(Text(f"    {_command(arguments)}"), soft_wrap=True)  # commands stay on one line, to be copied
    console.print(Text("\noptions", "bold"))
    options = Table.grid(padding=(0, 2))
    for flag, meaning in FLAGS:
        options.add_row(Text(f"  {flag}", "cyan"), Text(meaning))
    console.print(options)
    console.print(f"\n{REFERENCE}")


def _command(arguments: str) -> str:
    return f"python -m verl.trainer.main_ppo {arguments}".rstrip()
