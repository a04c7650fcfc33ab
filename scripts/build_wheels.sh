#!/usr/bin/env bash
# Builds the wheels of both distributions: verl-sync (import name verl) and verl-sync-engine (import name verl_sync).
#
#   scripts/build_wheels.sh [FOLDER] [verl|verl_sync]     into dist/ unless told otherwise; one of them, or both
#   PROJECT_URL=https://...                               the public repository, to which descriptions then lead
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
FOLDER=$(mkdir -p -- "${1:-$ROOT/dist}" && cd -- "${1:-$ROOT/dist}" && pwd -P)

# Built from a copy: setuptools keeps what it has built once, also files that are gone, and packs them again.
SCRATCH=$(mktemp -d)
trap 'rm -rf -- "$SCRATCH"' EXIT
tar -C "$ROOT" --exclude=__pycache__ --exclude='*.egg-info' --exclude=distributions/verl_sync/build -cf - \
    verl recipe distributions pyproject.toml README.md LICENSE | tar -C "$SCRATCH" -xf -

PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
"$PYTHON" "$ROOT/scripts/for_index.py" "$SCRATCH" ${PROJECT_URL:+"$PROJECT_URL"}

build() { "$PYTHON" -m pip -q wheel --no-deps --no-build-isolation -w "$FOLDER" "$1"; }

case ${2:-both} in
    verl) build "$SCRATCH" ;;
    verl_sync) build "$SCRATCH/distributions/verl_sync" ;;
    both) build "$SCRATCH" && build "$SCRATCH/distributions/verl_sync" ;;
    *) echo "error: no such distribution: $2; verl or verl_sync" >&2 && exit 2 ;;
esac
ls -1 -- "$FOLDER"/*.whl
