# make demo | make test: both make the environment first. PIP_ARGS reaches every pip install, for instance to name an
# index with CPU builds of torch, where the default one would bring gigabytes of CUDA.
PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
# Processes that share the tests, each with one thread. With 0, all in this one: for a debugger.
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OWN := tests/integrations/llama-index-openai.txt

.PHONY: env demo serve-demo test lint types docs docs-check bench clean
.DEFAULT_GOAL := env

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(OWN)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("kvquilt needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps --upgrade --target $(VENV)/llama-index-openai --requirement $(OWN)
	@touch $@

demo: env
	$(BIN)/kvquilt models fetch smollm2
	$(BIN)/kvquilt demo

serve-demo: env
	$(BIN)/kvquilt models fetch smollm2
	$(BIN)/kvquilt serve smollm2 --demo

test: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

docs: env
	$(BIN)/python scripts/gen_docs.py

docs-check: env
	$(BIN)/python scripts/gen_docs.py --check

RESULTS := benchmarks/results
bench: env
	$(BIN)/python benchmarks/startup.py --json $(RESULTS)/startup.json
	$(BIN)/python benchmarks/store.py --json $(RESULTS)/store.json
	$(BIN)/kvquilt bench ttft --threads 2 --json $(RESULTS)/ttft-4096.json
	$(BIN)/kvquilt bench ttft --threads 2 --context-tokens 1024 --documents 4 --json $(RESULTS)/ttft-1024.json
	$(BIN)/kvquilt bench ttft --threads 2 --context-tokens 256 --documents 2 --json $(RESULTS)/ttft-256.json
	$(BIN)/python benchmarks/profile_first_token.py --threads 2 --json $(RESULTS)/profile-first-token.json

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
