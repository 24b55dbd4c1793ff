# `make` lists the commands. The first one that needs .venv creates it and installs the packages.
PYTHON ?= python3
# Processes that run the tests; each loads PyTorch, so more than there are cores gain nothing.
WORKERS ?= 2
# Markers of the tests that are too long for `make test`; `make test-all` runs them as well.
LONG := kill or hard or docs or notebook or browser or peers

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS := constraints.txt
OLDEST := build/oldest.txt

.DEFAULT_GOAL := help
.PHONY: help quickstart check test tests test-all newest oldest speed gpu lint docs release clean

help: ## list these commands
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{ printf "%-18s%s\n", $$1, $$2 }'

quickstart: $(STAMP) ## train a small Transformer on this machine in minutes and translate with it
	@$(BIN)/python -m scripts.quickstart

check: lint ## lint, types, the paper and the commands, which use each folder: a minute
	$(BIN)/python -m pytest tests/test_imports.py tests/paper tests/cli -m "not slow and not ($(LONG))" -n $(WORKERS)

test: lint tests ## everything that has to pass: lint and tests

tests: $(STAMP)
	$(BIN)/python -m pytest -m "not ($(LONG))" -n $(WORKERS) --dist worksteal

test-all: test ## the same and the longest tests: the documentation's code, killed runs, peers ...
	$(BIN)/python -m pytest -m "$(LONG)" -n $(WORKERS) --dist worksteal

newest: ## the tests with the newest versions that pyproject.toml allows, in .venv-newest
	@rm -f .venv-newest/.installed
	@PIP_UPGRADE=1 PIP_UPGRADE_STRATEGY=eager $(MAKE) tests VENV=.venv-newest CONSTRAINTS=

oldest: ## the tests with the lowest versions that pyproject.toml allows, in .venv-oldest
	@$(MAKE) tests VENV=.venv-oldest CONSTRAINTS=$(OLDEST)

speed: $(STAMP) ## the speed on this machine's CPU, in 40 minutes at most; writes tables into docs/performance.md and README
	$(BIN)/python -m scripts.speed

gpu: $(STAMP) ## the tests and the benchmarks that need a GPU; writes tables into docs/performance.md
	CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES-0} $(BIN)/python -m pytest -m gpu
	CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES-0} $(BIN)/python -m scripts.gpu_report

lint: $(STAMP) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

release: $(STAMP) ## wheel and sdist, proved in a clean environment; MODEL=DIR proves a model as well
	@$(BIN)/python -m scripts.release $(if $(MODEL),--model $(MODEL))

docs: $(STAMP) ## the API reference, from the docstrings, as HTML in build/docs
	$(BIN)/python -m scripts.api_reference --output build/docs

clean: ## remove environments and caches; outputs/ stays
	rm -rf $(VENV) .venv-newest .venv-oldest build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The lower bound of each direct requirement, as its only version.
$(OLDEST): pyproject.toml
	@mkdir -p $(@D)
	@grep -oE '"[A-Za-z0-9-]+(\[[a-z,]+\])?>=[0-9.]+' $< | sed -E 's/"//; s/\[.*\]//; s/>=/==/' >$@

# The stamp is written last, so that the next command repeats an interrupted installation.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed; give its name: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing PyTorch, transformers and the rest into $(VENV): a few minutes, once."
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet $(CONSTRAINTS:%=--constraint %) --editable '.[dev]'
	@touch $@
