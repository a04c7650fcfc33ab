#!/usr/bin/env bash
# What a single CUDA device can prove without Ray, vLLM or an installation of this project: tests marked `gpu`, then
# benchmarks.device. Needs Python 3.11 or newer with torch 2.11 or newer, numpy, numba, psutil, pytest, msgspec, xxhash.
#
#   scripts/gpu_check.sh [DIRECTORY] [options of benchmarks.device]
#
# PYTHON names the interpreter (python3). DIRECTORY (default build/gpu_check) gets result.json and table.txt.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
directory=build/gpu_check
if [[ $# -gt 0 && $1 != -* ]]; then
    directory=$1
    shift
fi
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$directory"
"$python" - <<'CHECK'
import importlib.util
import sys

names = ("torch", "numpy", "numba", "psutil", "pytest", "msgspec", "xxhash")
missing = [name for name in names if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"error: missing for the check: {', '.join(missing)}. pip install {' '.join(missing)}")
import torch

if not torch.cuda.is_available():
    sys.exit(f"error: torch {torch.__version__} sees no CUDA device")
CHECK
# Without this project's settings of pytest: they ask for plugins, and for Ray.
"$python" -m pytest -q -c /dev/null --rootdir . --noconftest -p no:cacheprovider \
    -W ignore::pytest.PytestUnknownMarkWarning tests/checkpoint_engine/test_on_device.py tests/utils/test_device.py
"$python" -m benchmarks.device --output "$directory" "$@" | tee "$directory/table.txt"
