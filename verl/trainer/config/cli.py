"""The command line of every trainer: Hydra's overrides and flags, one line for every mistake."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl import __version__, envs
from verl.checkpoint_engine.errors import BackendUnavailable
from verl.checkpoint_engine.support.console import log_to_console
from verl.trainer.config.checking import Checked, grouped, noted, on_its_device
from verl.trainer.config.checks.algorithms import warnings
from verl.trainer.config.help import print_help
from verl.trainer.config.loader import DEFAULT_NAME, Resolved, compose_tree, load_config, resolve_config
from verl.trainer.config.record import CONFIG_NAME, composed_as, has_record
from verl.trainer.config.validate import problems_of
from verl.trainer.supervisor import Supervisor
from verl.utils.config import ConfigError
from verl.utils.device import any_device
from verl.utils.failures import NamedFailure, in_one_line
from verl.utils.torch_companions import require_loadable
from verl.workers.config import PPOConfig

logger = logging.getLogger("verl")
USAGE_ERROR = 2
"""Exit code for mistakes on the command line, or in files that it names."""
FAILURE = 1
"""Exit code for any other failure of a run, reported in one line if that explains it, else with a traceback."""


def run_hydra(
    main: Callable[[PPOConfig], None],
    argv: Sequence[str] | None = None,
    *,
    config_path: Path | None = None,
    config_name: str = DEFAULT_NAME,
    adapt: Callable[[PPOConfig], PPOConfig] | None = None,
    check: Callable[..., Checked] | None = None,
    known: Callable[[PPOConfig], Checked | None] | None = None,
) -> None:
    """Read the command line (default: sys.argv), check all of it, and call `main` with the configuration.

    Called once, by a trainer's `main_*` module, on the driver. A ConfigError, also one that `main` raises before it
    starts anything, becomes `error: ...` on stderr and exit code 2, a NamedFailure the same with exit code 1; every
    other exception, and with VERL_TRACEBACK=1 the latter, passes through with its traceback.

    `adapt` changes a configuration for a mode; its result is checked. Supports --help [SECTION ...], --version and
    --check, for which `check` (called with the configuration and `pictures`, see `Resolved`) checks its model and data
    and starts nothing, unless `known` has the findings; --supervised, which starts the command again when it dies; and
    as Hydra does --cfg job, --package, --resolve, --config-name, --config-path and --config-dir; `config_path` and
    `config_name` are their defaults, and the user's files can build on those of `config_path`. With --config-path
    alone, the output directory of a run is run again. Leaves no output directory behind.
    """
    parser = _parser()
    parser.set_defaults(config_path=config_path)
    arguments = parser.parse_intermixed_args(argv)
    if arguments.version:
        click.echo(f"verl-sync {__version__}\n", nl=False)
        return
    try:
        if arguments.help:
            print_help(sections=arguments.overrides)
            return
        where = {
            "config_path": arguments.config_path,
            "config_name": arguments.config_name or (CONFIG_NAME if has_record(arguments.config_path) else config_name),
            "config_dir": arguments.config_dir,
            "mode_dir": config_path,
        }
        if arguments.cfg:
            _print_configuration(arguments, where)
            return
        require_loadable()
        if arguments.check:
            _check(arguments.overrides, where, adapt, check, known)
            return
        resolved = resolve_config(arguments.overrides, **where)
        config = usable(resolved, adapt)
        if arguments.supervised:
            command = [sys.executable, *(word for word in sys.orig_argv[1:] if word != "--supervised")]
            log_to_console()
            sys.exit(Supervisor(command, config.trainer).run())
        with composed_as(resolved.composed):
            main(config)
    except (ConfigError, BackendUnavailable) as exc:
        _fail(str(exc))
    except NamedFailure as exc:
        if envs.shows_tracebacks():
            raise
        _fail(f"{in_one_line(exc)} (VERL_TRACEBACK=1 shows where)", code=FAILURE)


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        dashes = re.search(r"(?<=: )--([\w.]+=\S*)", message)
        _fail(f"{message}; " + (f"keys have no dashes before them: {dashes[1]}" if dashes else "see --help"))


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--supervised", action="store_true")
    parser.add_argument("--cfg", "-c", choices=("job",))
    parser.add_argument("--package", "-p")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd")
    return parser


def usable(resolved: Resolved, adapt: Callable[[PPOConfig], PPOConfig] | None = None) -> PPOConfig:
    """Raises ConfigError with a line for each problem. Warns of keys that cost more than in verl."""
    config, problems = _adapted(resolved.config, adapt)
    if problems := [*resolved.problems, *problems, *problems_of(config)]:
        raise ConfigError("\n".join(problems))
    for note in resolved.notes:
        if note.costs:
            logger.warning("%s", note)
    for line in warnings(config):
        logger.warning("%s", line)
    return config


def _adapted(config: PPOConfig, adapt: Callable[[PPOConfig], PPOConfig] | None) -> tuple[PPOConfig, list[str]]:
    """What the mode makes of `config`, or `config` and why it cannot."""
    try:
        return (adapt(config) if adapt is not None else config), []
    except ConfigError as exc:
        return config, str(exc).splitlines()


def _check(
    overrides: Sequence[str],
    where: Mapping[str, Any],
    adapt: Callable[[PPOConfig], PPOConfig] | None,
    check: Callable[..., Checked] | None,
    known: Callable[[PPOConfig], Checked | None] | None,
) -> None:
    """Print what a run would be, or everything that is wrong with it, by kinds."""
    with any_device():
        resolved = resolve_config(overrides, **where)
        config = on_its_device(resolved.config)
        lacking: list[str] = []
        problems = resolved.problems
        checked = None if known is None or resolved.pictures else known(config)
        if checked is None:
            config, unfit = _adapted(config, adapt)
            problems = [*problems, *unfit, *problems_of(config, lacking)]
            checked = check(config, pictures=resolved.pictures) if check is not None else Checked()
    problems = list(dict.fromkeys([*problems, *checked.problems]))
    if problems:
        sys.stderr.write(grouped(problems))
        raise SystemExit(USAGE_ERROR)
    not_here = (f"not here: {line}" for line in dict.fromkeys([*lacking, *checked.lacking]))
    warned = (f"warning: {line}" for line in (*warnings(config), *checked.warnings))
    told = [*checked.plan, *noted(resolved.notes), *warned, *checked.stand_ins, *not_here]
    click.echo("\n".join([*told, "nothing was started", ""]), nl=False)


def _print_configuration(arguments: argparse.Namespace, where: Mapping[str, Any]) -> None:
    """What Hydra's `--cfg job` prints: the composed YAML. Raises ConfigError if a run would not accept it."""
    load_config(arguments.overrides, **where)
    tree = compose_tree(arguments.overrides, **where)
    selected = OmegaConf.select(tree, arguments.package) if arguments.package else tree
    if arguments.package:
        if selected is None:
            raise ConfigError(f"--package {arguments.package}: no such section")
        click.echo(f"# @package {arguments.package}\n", nl=False)
    if not isinstance(selected, DictConfig):
        click.echo(f"{selected}\n", nl=False)
        return
    try:
        click.echo(OmegaConf.to_yaml(selected, resolve=arguments.resolve), nl=False)
    except OmegaConfBaseException as exc:
        raise ConfigError(f"--resolve: {str(exc).splitlines()[0]}") from exc


def _fail(message: str, *, code: int = USAGE_ERROR) -> NoReturn:
    sys.stderr.write("".join(f"error: {line}\n" for line in message.splitlines()))
    raise SystemExit(code)
