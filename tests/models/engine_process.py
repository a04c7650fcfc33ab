"""Real engines that are certified, one after the other in this process: each gets three versions.

    python -m tests.models.engine_process DIRECTORY ARCHITECTURE:DTYPE ...

Prints one line of JSON for each: its certificate. Models that vLLM runs through transformers' own classes need a
process of their own: it changes those classes, which the reference is made of, too.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path


def main() -> None:
    from tests.models.architectures import ARCHITECTURES, write_checkpoint
    from verl.checkpoint_engine.certify import certify

    base = Path(sys.argv[1])
    for cell in sys.argv[2:]:
        name, _, dtype = cell.partition(":")
        scratch = base / name
        scratch.mkdir(parents=True)
        write_checkpoint(ARCHITECTURES[name], scratch / "model", seed=1)
        certificate = certify(scratch / "model", dtype=dtype, ranks=1, backend="naive", scratch=scratch)
        sys.stdout.write("\n" + json.dumps(asdict(certificate) | {"name": name, "passed": certificate.passed}) + "\n")
        sys.stdout.flush()
        _forget_engine()


def _forget_engine() -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    main()
