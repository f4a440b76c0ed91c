# make eval: sets up, then runs the embedded model on the embedded test set under four plans and prints the table.
# make test: sets up, then lint, types and all tests.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: eval test quick lint install

eval: $(VENV)/.installed
	$(BIN)/tokensieve eval

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest -n 2

quick: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 -m "not slow"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

install: $(VENV)/.installed

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "tokensieve needs Python 3.10 or newer; make PYTHON=python3.11 ..."'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing tokensieve with torch and open_clip into $(VENV) (a few minutes, several GB)"
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "Installing tokensieve with torch, open_clip and the test tools into $(VENV) (a few minutes, several GB)"
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.installed
