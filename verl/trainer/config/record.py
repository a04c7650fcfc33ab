"""Records a run's configuration in its output directory, to read it and to run it again with `--config-path`."""

from __future__ import annotations

import logging
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

import verl
from verl.checkpoint_engine.support import records
from verl.utils.config import to_mapping
from verl.workers.config import PPOConfig

CONFIG_NAME = "config"
CONFIG_FILE = f"{CONFIG_NAME}.yaml"
RUNS_FILE = "runs.jsonl"
PACKAGES = ("torch", "transformers", "ray", "vllm", "sglang", "numpy")
ENVIRONMENT = "env_vars"
"""Ray's section of environment variables, the only part of a configuration with secrets."""
SECRET = re.compile(r"\w*(?:KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL)\w*", re.IGNORECASE)
SECRET_IN_WORD = re.compile(rf"({SECRET.pattern})(\s*[=:]\s*)([^,}}]+)", re.IGNORECASE)
LEFT_OUT = "???"
"""Hydra's marker for a mandatory value."""
MOST_SECONDS_OF_GIT = 5

logger = logging.getLogger(__name__)
_composed: ContextVar[DictConfig | None] = ContextVar("composed", default=None)


@contextmanager
def composed_as(tree: DictConfig | None) -> Iterator[None]:
    """Context of a run whose configuration Hydra composed as `tree`, which `record_run` writes.

    None keeps the tree of an outer context, if there is one.
    """
    token = _composed.set(_composed.get() if tree is None else tree)
    try:
        yield
    finally:
        _composed.reset(token)


def has_record(directory: str | Path | None) -> bool:
    """Whether `directory` is the output directory of a run, with a reusable configuration."""
    if directory is None:
        return False
    path = Path(str(directory).removeprefix("file://")).expanduser()
    return (path / CONFIG_FILE).is_file() and (path / RUNS_FILE).is_file()


def record_run(directory: Path, config: PPOConfig, **about: Any) -> None:
    """Write the configuration into `directory`, and append this start to its records. Called once, on the driver.

    `config.yaml` is the tree that Hydra composed, or all of `config` without one; it omits values of environment
    variables whose names mean secrets. `runs.jsonl` has an object for each start: when, where, the command, the
    versions of packages, the commits of this package and of the working directory, and the items of `about`. A full
    disk does not end the run: what is not written is logged.
    """
    tree = _composed.get()
    values = to_mapping(config) if tree is None else OmegaConf.to_container(tree, resolve=False)
    try:
        (directory / CONFIG_FILE).write_text(
            yaml.safe_dump(_without_secrets(values), sort_keys=False), encoding="utf-8"
        )
    except OSError as exc:
        logger.error("the configuration is not in %s: %s", directory / CONFIG_FILE, exc)  # noqa: TRY400 - in one line
    start = {
        "began": datetime.now(tz=UTC).isoformat(timespec="seconds"),
        "command": command(sys.orig_argv),
        "directory": str(Path.cwd()),
        "host": socket.gethostname(),
        "versions": versions(),
        "commits": commits(Path(verl.__file__).parent, Path.cwd()),
        **about,
    }
    records.append(directory / RUNS_FILE, [records.encoded(start)], "this start is")


def command(words: Sequence[str]) -> str:
    """This process's command line for a shell, without secrets."""
    return shlex.join(SECRET_IN_WORD.sub(rf"\1\2{LEFT_OUT}", word) if ENVIRONMENT in word else word for word in words)


def versions() -> dict[str, str]:
    """Versions of this program, Python and the packages that compute; omits packages that are not installed."""
    found = {"verl-sync": verl.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        for distribution in (name, f"{name}-cpu"):
            try:
                found[name] = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
            break
    return found


def commits(package: Path, working: Path) -> dict[str, str]:
    """The checked-out commit by directory, with `-dirty` if files have changed.

    Includes `package` only if it is part of a checkout, and not merely installed into one.
    """
    found: dict[str, str] = {}
    for directory, needs in ((package, "__init__.py"), (working, None)):
        top = _git(directory, "rev-parse", "--show-toplevel")
        if top is None or top in found or (needs and _git(directory, "ls-files", "--error-unmatch", needs) is None):
            continue
        commit = _git(directory, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
        if commit is not None:
            found[top] = commit
    return found


def _git(directory: Path, *words: str) -> str | None:
    """None without git, without a repository, and for one that takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=MOST_SECONDS_OF_GIT,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _without_secrets(values: Any, within: str = "") -> Any:
    if isinstance(values, Mapping):
        return {
            name: LEFT_OUT if within == ENVIRONMENT and SECRET.fullmatch(str(name)) else _without_secrets(value, name)
            for name, value in values.items()
        }
    return [_without_secrets(value) for value in values] if isinstance(values, (list, tuple)) else values
