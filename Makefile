VENV ?= .venv
PYTHON ?= python3
TRIES ?= 5000
VLLM_VENV ?= .venv-vllm
HARNESS_VENV ?= .venv-harness
RAY_VENV ?= .venv-ray
BIN := $(VENV)/bin

.NOTPARALLEL: # targets install into one virtual environment
.PHONY: help eval test test-page test-vllm test-harness test-ray quick docs attack audit lint install

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "Variables: VENV=$(VENV) (virtual environment), PYTHON=$(PYTHON) (creates it, e.g. make PYTHON=python3.12 test)"

eval: $(VENV)/.installed ## Evaluate the embedded model on 2,000 embedded test images with eight plans
	$(BIN)/tokensieve eval

test: $(VENV)/.installed-dev lint ## Run lint and all tests, and list the slowest tests
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=25

quick: $(VENV)/.installed-dev ## Run the tests that are not marked slow
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-page: $(VENV)/.installed-dev ## Drive the page of `tokensieve demo` in a browser (installs Debian's chromium and Playwright)
	$(BIN)/python -m tests.browser.install
	TOKENSIEVE_PAGE_TESTS=1 $(BIN)/python -m pytest -n 0 --durations=5 tests/browser

docs: $(VENV)/.installed-docs ## Build the documentation site into build/site, offline and with strict links
	$(BIN)/python docs/tooling/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

attack: $(VENV)/.installed-dev ## Run hostile tries, TRIES of each class (SEED=... repeats a run), and count the failures
	$(BIN)/python -m tests.hostile --tries $(TRIES) $(if $(SEED),--seed $(SEED))

audit: $(VENV)/.installed-dev ## Compare the installed versions with the public database of advisories
	$(BIN)/python -m pip install --quiet pip-audit
	$(BIN)/python -m pip_audit --strict --skip-editable

test-harness: $(HARNESS_VENV)/.installed ## Install lm-eval and lmms-eval, and compare their scores with that of tokensieve eval
	OMP_NUM_THREADS=1 $(HARNESS_VENV)/bin/python -m pytest -n 2 --dist worksteal --durations=5 tests/harnesses

test-ray: $(RAY_VENV)/.installed ## Install Ray, and encode images with two actors of which one is killed (examples/ray_encode.py)
	OMP_NUM_THREADS=1 $(RAY_VENV)/bin/python -m pytest -n 0 --durations=5 tests/examples/test_ray_encode.py

lint: $(VENV)/.installed-dev ## Run ruff (check and format) and mypy
	$(BIN)/ruff check src tests benchmarks docs/tooling examples/*.py
	$(BIN)/ruff format --check src tests benchmarks docs/tooling examples/*.py
	$(BIN)/mypy

test-vllm: $(VENV)/.installed-dev $(VLLM_VENV)/.installed ## Test the plug-in in a real vLLM server (installs vLLM, 3.5 GB)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.vllm_server.questions $(VLLM_VENV)/answers
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m tests.vllm_server.check $(VLLM_VENV)/answers

install: $(VENV)/.installed ## Install tokensieve into the virtual environment

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "tokensieve needs Python 3.10 or newer; make PYTHON=python3.11 ..."'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing tokensieve with all of its extras into $(VENV) (a few minutes, several GB)"
	$(BIN)/python -m pip install --quiet --editable '.[all]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "Installing tokensieve with torch, open_clip and the test tools into $(VENV) (a few minutes, several GB)"
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	@echo "Installing tokensieve with the documentation tools into $(VENV)"
	$(BIN)/python -m pip install --quiet --editable '.[all,docs]'
	touch $@ $(VENV)/.installed

$(HARNESS_VENV)/.installed: tests/support/layered_venv.sh pyproject.toml | $(VENV)/.installed-dev
	@echo "Installing lm-eval and lmms-eval into $(HARNESS_VENV), on top of $(VENV) (about two minutes, 1 GB)"
	bash tests/support/layered_venv.sh $(VENV) $(HARNESS_VENV) --editable '.[lm-eval,lmms-eval]'
	touch $@

$(RAY_VENV)/.installed: tests/support/layered_venv.sh pyproject.toml | $(VENV)/.installed-dev
	@echo "Installing Ray into $(RAY_VENV), on top of $(VENV) (under a minute, 0.5 GB)"
	bash tests/support/layered_venv.sh $(VENV) $(RAY_VENV) --editable '.[ray]'
	touch $@

$(VLLM_VENV)/.installed: tests/vllm_server/install.sh pyproject.toml
	@echo "Installing vLLM for CPUs into $(VLLM_VENV) (a few minutes, 3.5 GB)"
	PYTHON=$(PYTHON) bash tests/vllm_server/install.sh $(VLLM_VENV)
	touch $@
