"""Packages whose compiled parts are for CUDA, beside a torch for CPUs.

vLLM for CPUs requires them all. On x86_64 PyPI's are built for CUDA, and do not load beside a torch for CPUs. This
project uses none of them, but an installed one ends a job: transformers imports torchvision with its model classes and
torchaudio when it builds a model, vLLM imports torchcodec.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

from packaging.version import Version

from verl.utils.config import ConfigError

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
CPU = "cpu"
LOADED_WITHIN_S = 300.0
_LOAD = """
import importlib, json, sys
unloadable = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as exc:
        if name != "torchcodec" or not isinstance(exc, (ImportError, RuntimeError)):  # which vLLM goes on after
            unloadable.append(name)
print(json.dumps(unloadable))
"""


def unloadable() -> list[str]:
    """The installed packages that cannot be imported beside a torch for CPUs.

    Checks only the versions if these are for CPUs, too; else imports the packages in another process.
    """
    doubtful = [name for name in COMPANIONS if _build(name) not in (None, CPU)]
    if _build("torch") != CPU or not doubtful:
        return []
    asked = subprocess.run(
        [sys.executable, "-c", _LOAD, *doubtful], capture_output=True, text=True, timeout=LOADED_WITHIN_S, check=False
    )
    if asked.returncode:  # a library that ends its process is one that cannot be imported
        return doubtful
    found: list[str] = json.loads(asked.stdout.splitlines()[-1])
    return found


def remedy(names: list[str]) -> str:
    """The command that removes them from this environment, also from one made by uv without pip."""
    by_pip, by_uv = f"{sys.executable} -m pip uninstall -y", f"uv pip uninstall --python {sys.executable}"
    # Not find_spec: setuptools takes whoever looks for the module pip for pip, and leaves distutils to the library.
    return f"{by_uv if _build('pip') is None else by_pip} {' '.join(names)}"


def require_loadable() -> None:
    """Raises ConfigError, with the remedy, if one of them would end a job. Called before any import of them."""
    if names := unloadable():
        told = ", ".join(f"{name} {metadata.version(name)}" for name in names)
        raise ConfigError(
            f"not built for torch {metadata.version('torch')}, and break transformers or vLLM beside it: {told}. "
            f"Nothing needs them: {remedy(names)}"
        )


def _build(name: str) -> str | None:
    """`cpu` of 2.13.0+cpu; an empty string where the version does not say; None where it is not installed."""
    try:
        return Version(metadata.version(name)).local or ""
    except metadata.PackageNotFoundError:
        return None
