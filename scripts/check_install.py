"""Checks that this environment is the pinned CPU stack and that its compiled parts load.

Exit status 1, with the reasons, if not. Run by `scripts/install_cpu.sh` as its last step; safe to run at any time.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The transports' libraries, and what the processes of a job load: imported here, their bytecode is there for all.
LOADED_BY_JOBS = (
    "nixl",
    "mooncake.engine",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
    "verl.workers.fsdp_workers",
    "verl.trainer.main_ppo",
)
REQUIREMENT_FILES = ("torch-cpu.txt", "vllm-cpu.txt", "cpu.lock")


def pinned_versions() -> dict[str, str]:
    """Name to exact version, over all requirement files that the installer uses."""
    lines = [line for name in REQUIREMENT_FILES for line in (ROOT / "requirements" / name).read_text().splitlines()]
    return dict(re.findall(r"^([\w.-]+)==(\S+)", "\n".join(lines), flags=re.MULTILINE))


def version_problems() -> list[str]:
    """Packages that are missing or have another version than the pinned one."""
    problems = []
    for name, pinned in pinned_versions().items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            problems.append(f"{name} {pinned} is not installed")
            continue
        if installed != pinned:
            problems.append(f"{name} is {installed}, pinned is {pinned}")
    return problems


def import_problems() -> list[str]:
    """What is wrong with the compiled parts: torch's build, vLLM's kernels, the transports' libraries."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    problems = []
    if torch.version.cuda is not None:
        problems.append(f"torch {torch.__version__} is a CUDA build; the CPU stack needs a +cpu build")
    if not current_platform.is_cpu():
        problems.append(f"vLLM {vllm.__version__} runs on {current_platform.device_name}, not on cpu")
        return problems
    # When its kernel library cannot be loaded vLLM only warns, and fails in the first forward pass.
    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "silu_and_mul"):
        problems.append("vLLM's CPU kernels did not load; the warnings above name the library")
    for module in LOADED_BY_JOBS:
        try:
            importlib.import_module(module)
        except ImportError as exc:
            problems.append(f"{module} cannot be loaded: {exc}")
    return problems


def main() -> int:
    problems = version_problems() or import_problems()
    for problem in problems:
        print(problem)
    if problems:
        return 1
    stack = ("torch", "vllm-cpu", "ray", "transformers", "tensordict", "verl-sync")
    print("     " + ", ".join(f"{name} {metadata.version(name)}" for name in stack))
    return 0


if __name__ == "__main__":
    sys.exit(main())
