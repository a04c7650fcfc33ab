#!/usr/bin/env bash
# Whole runs on a machine with one NVIDIA GPU that has torch and transformers, and reaches no network.
#
#   scripts/gpu_kit.py pack build/gpu_kit                          here: Ray, vLLM and the rest, in parts for transfers
#   scripts/gpu_run.sh SITE OUTPUT PART... [-- OPTIONS]            there, once for each transfer: unpacks its parts into
#                                                                  SITE and, given --, runs the stages
#
# OPTIONS are those of `python -m benchmarks.whole_run` (see its --help). OUTPUT gets results.jsonl, table.txt and
# logs.tar.gz, as they come. PYTHON names the interpreter (python3).
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
if [[ $# -lt 2 || $1 == -* ]]; then
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
python=${PYTHON:-python3} site=$1 output=$2
shift 2
parts=()
while [[ $# -gt 0 && $1 != -- ]]; do
    parts+=("$1")
    shift
done
if [[ ${#parts[@]} -gt 0 ]]; then
    "$python" scripts/gpu_kit.py unpack "$site" "${parts[@]}"
fi
if [[ $# -eq 0 ]]; then
    exit 0
fi
shift
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PATH="$PATH:$site/bin" PYTHONUNBUFFERED=1
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-INFO}
# What the kit leaves out, because it is large or compiles for minutes.
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0
"$python" - <<'CHECK'
import importlib.util
import sys

names = ("torch", "transformers", "numpy", "numba", "pandas", "peft", "psutil", "pyarrow", "pytest", "rich", "xxhash")
missing = [name for name in names if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"error: this Python lacks {', '.join(missing)}, which the kit does not bring: name another with PYTHON")
CHECK
exec "$python" -m benchmarks.whole_run --output "$output" "$@"
