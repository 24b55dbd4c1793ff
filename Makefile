# `make` lists the commands. Each makes .venv and installs what it needs by itself, once.
PYTHON ?= python3
# Processes that share the tests; each loads PyTorch, so more than the cores gain nothing.
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help quickstart test lint clean

help: ## list these commands
	@sed -n 's/^\([a-z][a-z]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{ printf "%-18s%s\n", $$1, $$2 }'

quickstart: $(STAMP) ## train a small Transformer on this machine in minutes and translate with it
	@$(BIN)/python -m scripts.quickstart

test: lint ## everything that has to pass: lint, quick tests, slow tests
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS)
	$(BIN)/python -m pytest -m slow -n $(WORKERS) --dist worksteal

lint: $(STAMP) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## remove .venv and caches; outputs/ stays
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an interrupted installation is taken up again by the next command.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed; name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing PyTorch, transformers and the rest into $(VENV): a few minutes, once."
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
