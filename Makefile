# `make demo` and `make test` are all a fresh machine needs: make and Python 3.11 to 3.14; the rest is installed into .venv.
# macOS has GNU Make 3.81, without .ONESHELL: each line of a recipe runs in a shell of its own.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help env demo test quick gpu soak lint size mutants bench pictures clean lock address
unexport PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE

ARGS :=
URL :=
EXTRAS :=
PYTHON := python3 python3.14 python3.13 python3.12 python3.11 python
RUN := .venv/bin/python
# pytest in one process more than there are cores, at most 8; see tests/conftest.py.
PYTEST := $(RUN) -m pytest -q -n auto --maxprocesses 8 --dist worksteal

help:  ## this list
	@echo 'make <target> [ARGS="key=value ..."]'
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' Makefile

env:  ## build .venv from the hashed locks, with EXTRAS=timm,onnx; does nothing when they have not changed
	@PYTHON='$(PYTHON)' EXTRAS='$(EXTRAS)' .ci/env

demo: env  ## train a small model on images that it draws itself
	@$(RUN) train.py recipe=demo $(ARGS)

test: env  ## the tests that take seconds each
	@$(PYTEST) $(ARGS)

# A test file that can start a process or run a training imports one of these modules or calls it.
quick: env  ## the test files that start no process and run no training: 1 minute
	@$(PYTEST) $(ARGS) \
	    $$(grep -rLE --include='test_*.py' --exclude-dir=equal \
        -e '^(import|from) (subprocess|scripts|pipeline\.(data\.build|feed\.(feed|loader))|tests.*(small_run|processes))( |\.|$$)' \
        -e 'train\.(train|main)\(' tests)

gpu: env  ## the tests that need an NVIDIA GPU, in one process: 5 minutes on an H100
	@$(RUN) -m pytest -q -m "gpu and not slow" --durations=10 $(ARGS)

soak: env  ## the tests that `make test` leaves out, to stay short
	@$(PYTEST) -m slow $(ARGS)

mutants: env  ## apply each bug of tests/repository/mutants to a copy, which its tests must find: 40 minutes
	@$(RUN) .ci/mutants $(ARGS)

lint: env  ## ruff, mypy, and limits on habits of translated English
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check
	@$(RUN) -m mypy
	@$(RUN) .ci/words

size:  ## lines and decisions of each part of the program, and what it may have; any Python from 3.9 on
	@$(firstword $(PYTHON)) .ci/size

bench: env  ## measure the input pipeline and the training step
	@$(RUN) scripts/bench.py $(ARGS)

pictures: env  ## make the pictures of README.md and docs/ from two runs of the demo; needs Chromium
	@$(RUN) .ci/pictures

clean:  ## remove .venv and caches; runs/ and data/ stay
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache
	@find . \( -path ./runs -o -path ./data \) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

lock:  ## rewrite the locks from requirements.txt and the groups of pyproject.toml; needs uv
	@.ci/lock $(ARGS)

address:  ## write URL=https://github.com/OWNER/NAME, the address of a fork, into the files that name it
	@.ci/address '$(URL)'
