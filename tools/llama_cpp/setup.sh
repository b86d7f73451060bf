#!/bin/sh
# Makes an environment with llama.cpp, compiled for this machine's CPU, apart from jaxserve's own.
#
#     tools/llama_cpp/setup.sh [DIR]        DIR: .venv-llama at the root unless given
#
# Needs Python 3.11 (PYTHON names another one), cmake and a C++ compiler. Some ten minutes on two
# cores, 200 MB.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
target=${1:-"$root/.venv-llama"}

"${PYTHON:-python3.11}" -m venv "$target"
"$target/bin/pip" install --quiet --upgrade pip
# From its source, since wheels are built for older CPUs. GGML_NATIVE is -march=native.
CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" \
	"$target/bin/pip" install --no-binary llama-cpp-python llama-cpp-python==0.3.36
"$target/bin/pip" install gguf==0.17.1
"$target/bin/python" -c 'import llama_cpp as cpp; print("llama.cpp is ready:", cpp.llama_print_system_info().decode())'
