"""What PyPI's verl computes, in a process of its own: it has the name of our package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.distributions.environments import BESIDE, ROOT

HERE = Path(__file__).parent
VERL, OURS = BESIDE, ROOT


def computed(script: str, given: Any, folder: Path) -> Any:
    """What `script`, a file beside this one, prints as JSON in its last line when `given` comes in; `folder`: verl's
    or ours, which it finds before everything installed."""
    done = subprocess.run(
        [sys.executable, HERE / script],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def differences() -> dict[str, dict[str, str]]:
    """Those that are on purpose, by name."""
    found = tomllib.loads((HERE / "differences.toml").read_text())["difference"]
    return {one["name"]: one for one in found}
