"""Forks a process for each script that comes in, a line of JSON: to import this takes one 6 s of processor time.

Not tensordict, of which PyPI's verl has another version than we. `original.py` starts this.
"""

import json
import os
import runpy
import sys
import traceback
from typing import Any

import accelerate  # noqa: F401
import datasets  # noqa: F401
import omegaconf  # noqa: F401
import ray  # noqa: F401
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401


def become(script: str, folder: str, files: list[str]) -> None:
    """The script, with its input, output and errors in files; `folder` before everything installed."""
    for number, (file, flags) in enumerate(zip(files, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)):
        os.dup2(os.open(file, flags), number)
    sys.stdin = open(0)  # noqa: SIM115  # the old one has read ahead
    os.environ["PYTHONPATH"] = folder
    sys.path[:] = [os.path.dirname(script), folder, *sys.path[1:]]
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def forked(call: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        become(**call)
        status = 0
    except Exception:  # noqa: BLE001 - told
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(f"{forked(json.loads(line))}\n")
        sys.stdout.flush()
