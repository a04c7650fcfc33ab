"""The page behind `python -m verl.trainer.main_ppo --help`."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from verl.trainer.config.schema import documented_sections, yaml_text

USAGE = "python -m verl.trainer.main_ppo [key=value ...] [--config-name NAME] [--config-path DIR] [--cfg job] [--help]"
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
    ("--config-name NAME", "YAML file to start from, without .yaml; it may say `defaults: [ppo_trainer, _self_]`"),
    ("--config-path DIR", "directory of that file; --config-dir DIR: one more directory to search"),
    ("--help", "this page"),
)
REFERENCE = "Every key with its type and meaning: docs/configuration.md"


def print_help(console: Console | None = None) -> None:
    """Write the page to stdout: tables on a terminal, one key per line where output is piped."""
    console = console or Console()
    if console.is_terminal:
        _rich_page(console)
    else:
        console.print(Text(plain_page()), soft_wrap=True)


def plain_page() -> str:
    lines = [f"usage: {USAGE}", "", ABOUT, "", "examples:"]
    lines += [f"  {_command(arguments)}    # {what}" for what, arguments in EXAMPLES]
    lines += ["", "options:", *(f"  {flag:<20} {meaning}" for flag, meaning in FLAGS)]
    lines += ["", REFERENCE, "", "keys:"]
    for section in documented_sections():
        lines += ["", f"{section.path}: {section.doc}"]
        lines += [f"  {key.path}={yaml_text(key.default)}    {key.help_with_allowed}" for key in section.keys]
    return "\n".join(lines)


def _rich_page(console: Console) -> None:
    lines = [Text.assemble(("usage: ", "bold"), USAGE), Text(), Text(ABOUT), Text(), Text("examples", "bold")]
    for what, arguments in EXAMPLES:
        lines += [Text(f"  {what}", "dim"), Text(f"    {_command(arguments)}")]
    lines += [Text(), Text("options", "bold")]
    for line in lines:
        console.print(line, soft_wrap=True)  # commands stay on one line, to be copied
    options = Table.grid(padding=(0, 2))
    for flag, meaning in FLAGS:
        options.add_row(Text(f"  {flag}", "cyan"), Text(meaning))
    console.print(options)
    console.print(f"\n{REFERENCE}")
    for section in documented_sections():
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(ratio=2, overflow="fold")
        table.add_column(ratio=3)
        for key in section.keys:
            name = Text.assemble((key.name, "cyan"), f"={yaml_text(key.default)}")
            table.add_row(Padding(name, (0, 0, 0, 2)), Text(key.help_with_allowed))
        console.print()
        console.print(Text.assemble((section.path, "bold"), (f"  {section.doc}", "dim")))
        console.print(table)


def _command(arguments: str) -> str:
    return f"python -m verl.trainer.main_ppo {arguments}".rstrip()
