#!/usr/bin/env bash
# Make .venv-sglang, in which the tests run real SGLang engines on the CPU. Usage: scripts/setup_sglang.sh
#
#   PYTHON=python3.12               the interpreter that it is made from (default: python3)
#   DFLASH2_SGLANG_PYTHON=/a/python an environment of your own: it is checked, and nothing is installed
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv-sglang
SGLANG=sglang==0.5.23
TORCH=torch==2.13.0+cpu
CPU_INDEX=https://download.pytorch.org/whl/cpu
# What SGLang imports on a CPU. Its own list is for CUDA: kernels of many gigabytes, and a CUDA build of torch.
NEEDED=(
    transformers==5.19.0 xgrammar==0.2.7 compressed-tensors==0.18.0 openai==2.8.0 openai-harmony==0.0.4
    'llguidance<2' outlines==0.1.11 accelerate aiohttp anthropic datasets dill distro einops fastapi gguf interegular
    IPython msgspec numba orjson partial_json_parser pillow prometheus-client psutil pybase64 pydantic python-multipart
    pyzmq requests scipy sentencepiece setproctitle tiktoken uvicorn uvloop watchfiles xxhash zstandard
)

if [ -n "${DFLASH2_SGLANG_PYTHON:-}" ]; then
    "$DFLASH2_SGLANG_PYTHON" -c 'import dflash2, hypothesis, pytest, sglang' || {
        echo "setup: DFLASH2_SGLANG_PYTHON=$DFLASH2_SGLANG_PYTHON lacks sglang, pytest, hypothesis or dflash2; install them there." >&2
        exit 1
    }
    exit
fi
key=$(cat pyproject.toml scripts/setup_sglang.sh <(pwd) | cksum)
[ "$(cat $VENV/setup 2>/dev/null)" = "$key" ] && exit

echo "setup: making $VENV with $SGLANG, 3 GB and about three minutes" >&2
"${PYTHON:-python3}" -m venv --clear "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
# First a build that lies ready (PIP_FIND_LINKS), then PyTorch's own index.
pip install --no-index --no-deps "$TORCH" 2>/dev/null || pip install --no-deps --index-url "$CPU_INDEX" "$TORCH"
pip install "$TORCH" "${NEEDED[@]}" pytest hypothesis
pip install --no-deps "$SGLANG"
pip install --no-deps --config-settings editable_mode=compat --editable .
echo "$key" >"$VENV/setup"
