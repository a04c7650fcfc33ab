"""The interpreter that has an environment of `verifiers`, which needs packages that a run may not have."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from verl.utils.config import ConfigError

PROGRAM = Path(__file__).with_name("verifiers_program.py")
CHECK_S = 300.0
ROWS_S = 3600.0
INSTALL = "python -m venv .venv-verifiers && .venv-verifiers/bin/pip install 'verifiers>=0.1.14,<0.5' uv {package}"
"""`package` is the environment's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An environment by name, with the arguments of its `load_environment`, or its block of verifiers 0.4."""

    environment: str
    arguments: Mapping[str, Any]
    python: str | None = None
    """Interpreter; None: this one."""

    @classmethod
    def of(cls, where: str, *, environment: Any = None, arguments: Any = None, python: Any = None) -> Source:
        """Raises ConfigError, with `where`, for what cannot be one."""
        if not isinstance(environment, str) or not environment.strip():
            raise ConfigError(
                f"{where} needs environment, the name of one of verifiers, not {environment!r}: "
                "`python -m verl.utils.data prepare verifiers` writes its entry for agent_loop_config_path"
            )
        if arguments is not None and not isinstance(arguments, Mapping):
            raise ConfigError(f"{where}: arguments={arguments!r} is no mapping of names to values")
        try:
            json.dumps(arguments)
        except (TypeError, ValueError) as exc:
            raise ConfigError(f"{where}: arguments={arguments!r} cannot be written as JSON: {exc}") from exc
        if python is not None and not isinstance(python, str):
            raise ConfigError(f"{where}: python={python!r} is not the path of an interpreter")
        return cls(environment=environment, arguments=dict(arguments or {}), python=python)

    @property
    def loop_name(self) -> str:
        """Of its agent loop, in data and configuration."""
        return f"verifiers/{self.environment.split('/')[-1]}"

    @property
    def command(self) -> str:
        """That of its rollouts: a `server` of `OpenAIAgentLoop`."""
        return shlex.join(self._words("serve"))

    def check(self, where: str) -> None:
        """Raises ConfigError unless its interpreter has it. The environment is not imported."""
        python = self._python
        if shutil.which(python) is None:
            raise ConfigError(f"{where}: python={python} is not there. {_remedy(self.environment)}")
        found = _checked(*self._words("check"))
        if missing := found["missing"]:
            raise ConfigError(f"{where}: {python} {missing}. {_remedy(self.environment)}")

    def rows(self, limit: int) -> list[dict[str, Any]]:
        """At most `limit` of each split, as `verifiers_program` writes them. Raises ConfigError."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            _run([*self._words("rows", limit=limit), str(path)], ROWS_S)
            return [json.loads(line) for line in path.read_text("utf-8").splitlines()]

    @property
    def _python(self) -> str:
        return sys.executable if self.python is None else str(Path(self.python).expanduser())

    def _words(self, command: str, **further: Any) -> list[str]:
        options = {"environment": self.environment, "arguments": dict(self.arguments), **further}
        return [self._python, str(PROGRAM), command, json.dumps(options)]


@cache
def _checked(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_run(list(words), CHECK_S))
    return found


def _run(words: list[str], timeout_s: float) -> str:
    """Its output. Raises ConfigError."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ConfigError(f"{words[0]} cannot run {PROGRAM.name}: {exc}") from exc
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ConfigError(lines[-1] if lines else f"{words[0]} {PROGRAM.name} ended with {done.returncode}")
    return done.stdout


def _remedy(environment: str) -> str:
    install = INSTALL.format(package=environment.split("/")[-1])
    return f"Name an interpreter that has it with `python`; two commands make one: {install}"
