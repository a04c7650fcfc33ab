"""What PyPI's verl computes, in a process of its own: it has the name of our package."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from tests.distributions.environments import BESIDE, ROOT

HERE = Path(__file__).parent
VERL, OURS = BESIDE, ROOT


def computed(script: str, given: Any, folder: Path) -> Any:
    """What `script`, a file beside this one, prints as JSON in its last line when `given` comes in; `folder`: verl's
    or ours, which it finds before everything installed."""
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory, name) for name in ("stdin", "stdout", "stderr")]
        for file in files:
            file.write_text(json.dumps(given) if file.name == "stdin" else "")
        call = {"script": str(HERE / script), "folder": str(folder), "files": [*map(str, files)]}
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(call) + "\n")
        server.stdin.flush()
        status = server.stdout.readline().strip()
        assert status == "0", f"{script} ended with {status or 'its server'}: {files[2].read_text()}"
        return json.loads(files[1].read_text().splitlines()[-1])


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Ends with this process, whose end of its pipe then closes."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, HERE / "warm.py"]
    return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def differences() -> dict[str, dict[str, str]]:
    """Those that are on purpose, by name."""
    found = tomllib.loads((HERE / "differences.toml").read_text())["difference"]
    return {one["name"]: one for one in found}
