"""What is for PyPI's verl 0.9.1, run with it: its package is `verl` there, so in processes of their own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.distributions.environments import BESIDE, ROOT, install, run


@pytest.mark.parametrize("name", ["check_published.py", "check_manager.py"])
@pytest.mark.timeout(900)
def test_with_pypi_s_verl(name: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path):
    site = install(tmp_path_factory.mktemp("installed"))
    here = "tests/distributions/with_verl"
    shutil.copytree(ROOT / here, tmp_path / here)
    shutil.copy(ROOT / "examples/beside_pypi_verl/verl_sync.yaml", tmp_path / here)
    for package in ("tests", "tests/distributions"):
        (tmp_path / package / "__init__.py").touch()
    options = ["-q", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, tmp_path / here / name]
    done = run(command, path=[tmp_path, site, BESIDE], cwd=tmp_path, timeout_s=800)
    assert " passed in " in done.stdout.splitlines()[-1], done.stdout
