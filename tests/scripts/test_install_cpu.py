"""The installer chooses among the Pythons of a machine, and says what is the matter with each."""

import os
import subprocess
from pathlib import Path

import pytest

INSTALLER = Path(__file__).resolve().parents[2] / "scripts" / "install_cpu.sh"
NAMES = ("python3.11", "python3", "python3.12", "python3.13", "python3.14")
IS_310 = "#!/bin/sh\necho 3.10\n"
IS_312 = "#!/bin/sh\necho 3.12\n"
BROKEN = "#!/bin/sh\nexit 127\n"
ANOTHER_MACHINE = "#!/bin/sh\necho Darwin\n"
"""As `uname`: the installer stops after it has chosen."""


def installed(folder: Path, **pythons: str) -> str:
    """What the installer says where these are all Pythons."""
    programs = {name: pythons.get(name.replace(".", "_"), BROKEN) for name in NAMES} | {"uname": ANOTHER_MACHINE}
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    done = subprocess.run(
        [INSTALLER],
        env={"PATH": f"{folder}:/usr/bin:/bin", "VENV": str(folder / "none")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    return done.stderr


def test_every_python_is_named_with_what_is_wrong_with_it(tmp_path: Path):
    said = installed(tmp_path, python3=IS_310)
    assert "Python 3.11 to 3.14 is needed; python3.11 does not start; python3 is 3.10; python3.12 does not" in said
    assert "make install PYTHON=/path/to/python3.11" in said


@pytest.mark.parametrize("name", ["python3", "python3_12", "python3_13"])
def test_a_newer_python_is_found_beside_an_old_one(tmp_path: Path, name: str):
    assert "Python 3.11 to 3.14 is needed" not in installed(tmp_path, **{"python3": IS_310, name: IS_312})


def test_an_environment_of_another_directory_is_not_replaced(tmp_path: Path):
    (tmp_path / "theirs" / "bin").mkdir(parents=True)
    (tmp_path / "ours").symlink_to("theirs")
    done = subprocess.run(
        [INSTALLER], env={**os.environ, "VENV": str(tmp_path / "ours")}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert f"{tmp_path}/ours is a link to theirs" in done.stderr
    assert (tmp_path / "ours").is_symlink() and (tmp_path / "theirs" / "bin").is_dir()
