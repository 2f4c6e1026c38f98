#!/usr/bin/env bash
# Make the environment that `make demo` and `make test` run in. Usage: scripts/setup.sh demo|test
#
#   PYTHON=python3.12        the interpreter that .venv is made from (default: the first of 3.10 or newer)
#   DFLASH2_PYTHON=/a/python an environment of your own: it is checked, and nothing is installed
#   DFLASH2_TORCH=cpu|cuda   the build of torch, where looking for a GPU would decide wrongly
#
# Without a GPU only CPU builds of torch are taken: the CUDA build is several gigabytes.
set -euo pipefail
cd "$(dirname "$0")/.."

MODE=${1:-}
VENV=.venv
CPU_INDEX=https://download.pytorch.org/whl/cpu
TORCH='torch>=2.7'
case $MODE in
    demo) EXTRAS= MODULES='torch transformers gguf accelerate dflash2' ;;
    test) EXTRAS='[dev,train,eval,notebooks]' MODULES='torch transformers gguf accelerate pytest mypy ruff build dflash2' ;;
    *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

say() { printf '\033[1m%s\033[0m\n' "setup: $*" >&2; }
die() { printf 'setup: %s\n' "$@" >&2; exit 1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" || die "PYTHON=$PYTHON is not there or older than Python 3.10; name a newer one."
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "found no Python 3.10 or newer on PATH; install one, or run with PYTHON=/path/to/python."
}

check_own_environment() {
    new_enough "$DFLASH2_PYTHON" || die "DFLASH2_PYTHON=$DFLASH2_PYTHON is not there or older than Python 3.10."
    local module missing=
    for module in $MODULES; do
        "$DFLASH2_PYTHON" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$module') is None)" || missing+=" $module"
    done
    [ -z "$missing" ] || die "DFLASH2_PYTHON=$DFLASH2_PYTHON lacks:$missing." \
        "Install them there: $DFLASH2_PYTHON -m pip install -e '.$EXTRAS'"
}

has_gpu() {
    case ${DFLASH2_TORCH:-} in
        cuda) return 0 ;;
        cpu) return 1 ;;
        '') nvidia-smi -L 2>/dev/null | grep -q GPU || compgen -G '/dev/nvidia[0-9]*' >/dev/null ;;
        *) die "DFLASH2_TORCH=$DFLASH2_TORCH; expected cpu or cuda." ;;
    esac
}

# What the set-up depends on: when it is unchanged since the last one, there is nothing to do.
stamp_key() {
    local gpu=cpu
    has_gpu && gpu=cuda
    { cat pyproject.toml scripts/setup.sh; pwd; echo "$gpu ${PYTHON:-}"; } | cksum
}

done_already() {
    local key
    key=$(stamp_key)
    "$VENV/bin/python" -c '' 2>/dev/null || return 1
    # The tests' environment holds all that the demo needs.
    [ "$(cat "$VENV/setup-$MODE" 2>/dev/null)" = "$key" ] || [ "$(cat "$VENV/setup-test" 2>/dev/null)" = "$key" ]
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

make_venv() {
    local python=$1
    if "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && new_enough "$VENV/bin/python"; then
        return
    fi
    say "making $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV" || die "$python cannot make a virtual environment." \
        "On Debian and Ubuntu install python3-venv; or run with PYTHON=/path/to/another/python."
    pip install --quiet --upgrade 'pip>=24' || say "pip was not upgraded; going on with $(pip --version)"
}

# Version of torch that pip would install with these options, when that is a CPU build; empty otherwise.
cpu_build() {
    local report
    report=$(pip install --quiet --dry-run --ignore-installed --no-deps --only-binary :all: --report - "$@" "$TORCH" 2>/dev/null) || return 0
    "$VENV/bin/python" -c '
import json, sys
package = json.load(sys.stdin)["install"][0]
name = package["download_info"]["url"].rpartition("/")[2].replace("%2B", "+")
print(package["metadata"]["version"] if "+cpu" in name or sys.platform == "darwin" else "")' <<<"$report"
}

reachable() {
    "$VENV/bin/python" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=15)' "$1/torch/" 2>/dev/null
}

install_torch() {
    local version
    if "$VENV/bin/python" -c 'import torch, sys; sys.exit(sys.argv[1] == "cuda" and torch.version.cuda is None)' "$1" 2>/dev/null; then
        return
    fi
    if [ "$1" = cuda ]; then
        say "installing torch for CUDA"
        pip install --upgrade "$TORCH"
        return
    fi
    # First a build that lies ready (PIP_FIND_LINKS), then PyTorch's own index, then whatever index pip is set to use.
    version=$(cpu_build --no-index)
    if [ -n "$version" ]; then
        say "installing torch $version from the local wheels"
        pip install "torch==$version"
    elif reachable "$CPU_INDEX"; then
        say "installing torch for the CPU from $CPU_INDEX"
        pip install --index-url "$CPU_INDEX" "$TORCH"
    else
        version=$(cpu_build)
        [ -n "$version" ] || die "found no CPU build of torch: $CPU_INDEX cannot be reached, and the index that pip uses" \
            "offers a CUDA build of several gigabytes. Install a CPU build by hand with" \
            "  $VENV/bin/python -m pip install /path/to/torch-...+cpu-....whl" \
            "and run this again; or take the CUDA build with DFLASH2_TORCH=cuda."
        say "installing torch $version"
        pip install "torch==$version"
    fi
}

install_package() {
    local torch
    # Named with its exact version, torch cannot be replaced by another build on the way.
    torch=$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
    say "installing dflash2$EXTRAS"
    # "compat": a path entry. The default finder loses to a folder named dflash2, such as this clone seen from beside it.
    pip install --quiet --config-settings editable_mode=compat --editable ".$EXTRAS" "torch==$torch"
    if [ "$MODE" = test ] && [ "$(uname -s)" = Linux ] && ! "$VENV/bin/python" -c 'import triton' 2>/dev/null; then
        say "installing triton, whose interpreter runs the kernels' tests on the CPU"
        pip install --quiet --no-deps triton
    fi
    if [ "$MODE" = test ]; then
        say "installing dflash, the published implementation that the tests compare with"
        pip install --quiet --no-deps dflash==0.1.0  # without its dependencies: it pins torch and all others
    fi
}

if [ -n "${DFLASH2_PYTHON:-}" ]; then
    check_own_environment
    exit
fi
done_already && exit
if command -v flock >/dev/null; then # two makes at once on a fresh clone
    exec 9>.venv.lock
    flock 9
    done_already && exit
fi
python=$(find_python)
make_venv "$python"
rm -f "$VENV"/setup-*
if has_gpu; then install_torch cuda; else install_torch cpu; fi
install_package
stamp_key >"$VENV/setup-$MODE"
say "ready: $("$VENV/bin/python" -c 'import torch; print("torch", torch.__version__)')"
