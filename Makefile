# Two commands matter: `make serve` and `make test`. Each makes its own environment first.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
REFERENCE := .venv-reference
ARGS ?=

.PHONY: serve test lint reference format clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

serve: $(READY) ## serve the model in the box; ARGS="--config=... --port=..." for another
	$(BIN)/python serve.py $(if $(findstring --config,$(ARGS)),,--config=configs/tiny_cpu.py) $(ARGS)

test: $(READY) ## the whole suite; ARGS="-k name" for a part
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

clean: ## remove the environments and caches
	rm -rf $(VENV) $(REFERENCE) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
