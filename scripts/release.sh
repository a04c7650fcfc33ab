#!/usr/bin/env bash
# Builds what a release publishes, and checks it as a stranger would use it. Publishes nothing.
#
#   scripts/release.sh            source distribution and both wheels into dist/, checked, each wheel in a clean environment
#   scripts/release.sh --train    and one step of the default job there
#   PROJECT_URL=https://...       the public repository: links and pictures of the descriptions lead there, and metadata name it
#
# The environment is made as `make install` makes .venv, with the same pinned packages, in a temporary directory, and
# everything in it is run from outside of this repository.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
STAMP=.verl-sync-installed
TOOLS=(build==1.6.1 twine==7.0.0)
die() { printf 'error: %s\n' "$1" >&2; exit 1; }
say() { printf '\n--- %s\n' "$1"; }

TRAIN=false
case ${1:-} in
    "") ;;
    --train) TRAIN=true ;;
    *) die "unknown option $1; known: --train" ;;
esac

cd "$ROOT"
PYTHON=$(command -v "${PYTHON:-python3.11}" || command -v python3) || die "no Python"
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
grep -q "^version: $version$" CITATION.cff || die "CITATION.cff has another version than pyproject.toml's $version"
grep -q "^## \[\(Unreleased\|$version\)\]" CHANGELOG.md || die "CHANGELOG.md has no section for $version"
[ -z "$(git status --porcelain)" ] || die "there are changes that no commit has: a release is what a commit is"

WORK=$(mktemp -d)
trap 'rm -rf -- "$WORK"' EXIT

say "building $version"
"$PYTHON" -m venv "$WORK/tools"
"$WORK/tools/bin/pip" --disable-pip-version-check -q install "${TOOLS[@]}"
rm -rf dist
git archive --format=tar HEAD | (mkdir "$WORK/source" && tar -x -C "$WORK/source")
"$PYTHON" scripts/for_index.py "$WORK/source" ${PROJECT_URL:+"$PROJECT_URL"}
"$WORK/tools/bin/python" -m build --outdir dist "$WORK/source" >"$WORK/build.log" || { cat "$WORK/build.log" >&2; die "the build failed"; }
"$PYTHON" -m venv "$WORK/engine"
"$WORK/engine/bin/pip" --disable-pip-version-check -q install 'setuptools>=78' wheel
PYTHON=$WORK/engine/bin/python "$WORK/source/scripts/build_wheels.sh" "$ROOT/dist" verl_sync >/dev/null
ls -l dist

say "checking what an index would show"
"$WORK/tools/bin/twine" check --strict dist/*
"$PYTHON" - dist/verl_sync-*.whl <<'PYTHON'
import sys
import zipfile

names = set(zipfile.ZipFile(sys.argv[1]).namelist())
needed = {"verl/py.typed", "verl/trainer/config/ppo_trainer.yaml", "verl/trainer/config/from_verl/verl_0_9.tsv"}
foreign = {name.split("/")[0] for name in names if not name.startswith(("verl/", "recipe/", "verl_sync-"))}
if needed - names or foreign:
    sys.exit(f"error: the wheel lacks {sorted(needed - names)} and has {sorted(foreign)} besides")
PYTHON

say "installing the wheel into a clean environment"
VENV=$WORK/clean WHEEL=$(echo "$ROOT"/dist/verl_sync-*.whl) PYTHON=$PYTHON scripts/install_cpu.sh
[ -f "$WORK/clean/$STAMP" ] || die "the environment is not complete"

say "using it from elsewhere"
mkdir "$WORK/elsewhere"
cd "$WORK/elsewhere"
export PATH=$WORK/clean/bin:$PATH
place=$(python -c 'import verl; print(verl.__file__, verl.__version__)')
[[ $place == "$WORK/clean/"*" $version" ]] || die "verl is $place"
verl-sync --version
verl-sync train --check >check.log 2>&1 || { cat check.log >&2; die "the default job does not pass its check"; }
tail -n 3 check.log
if $TRAIN; then
    verl-sync train trainer.total_training_steps=1 trainer.val_before_train=false trainer.test_freq=-1
fi

say "installing the engine's wheel, with what it asks for, into another one"
# First torch, of which PyPI has the CUDA build alone: pip's own configuration, or PyTorch's index.
torch=("$WORK/engine/bin/pip" --disable-pip-version-check -q install -r "$ROOT/requirements/torch-cpu.txt")
"${torch[@]}" >"$WORK/torch.log" 2>&1 || "${torch[@]}" --extra-index-url https://download.pytorch.org/whl/cpu
"$WORK/engine/bin/pip" --disable-pip-version-check -q install "$ROOT"/dist/verl_sync_engine-*.whl
place=$("$WORK/engine/bin/python" -c 'import verl_sync; from verl_sync import WeightPublisher; print(verl_sync.__file__)')
[[ $place == "$WORK/engine/"* ]] || die "verl_sync is $place"
for module in update node; do
    "$WORK/engine/bin/python" -m "verl_sync.$module" --help >/dev/null || die "verl_sync.$module does not start"
done

say "good: $(cd "$ROOT" && echo dist/*), of $(git -C "$ROOT" rev-parse --short HEAD)"
