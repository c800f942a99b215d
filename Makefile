# `make demo` and `make test` need only make and Python 3.11 to 3.14; everything else is installed into .venv.
# macOS has GNU Make 3.81 without .ONESHELL, so each line of a recipe runs in a separate shell.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help env demo test quick gpu soak lint size mutants bench pictures clean lock address
unexport PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE

ARGS :=
URL :=
EXTRAS :=
PYTHON := python3 python3.14 python3.13 python3.12 python3.11 python
RUN := .venv/bin/python
# pytest with one process more than cores, at most 8; see tests/conftest.py.
PYTEST := $(RUN) -m pytest -q -n auto --maxprocesses 8 --dist worksteal

help:  ## print this list
	@echo 'make <target> [ARGS="key=value ..."]'
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' Makefile

env:  ## build .venv from the hashed lock files, with EXTRAS=timm,onnx; does nothing if they have not changed
	@PYTHON='$(PYTHON)' EXTRAS='$(EXTRAS)' .ci/env

demo: env  ## train a small model on synthetic images
	@$(RUN) train.py recipe=demo $(ARGS)

test: env  ## run the tests that take seconds each
	@$(PYTEST) $(ARGS)

# Test files that start a process or run a training import one of these modules or call one of these functions.
quick: env  ## run the test files without processes and trainings: 1 minute
	@$(PYTEST) $(ARGS) \
	    $$(grep -rLE --include='test_*.py' --exclude-dir=equal \
        -e '^(import|from) (subprocess|scripts|pipeline\.(data\.build|feed\.(feed|loader))|tests.*(small_run|processes))( |\.|$$)' \
        -e 'train\.(train|main)\(' tests)

gpu: env  ## run the tests that need an NVIDIA GPU, in one process: 5 minutes on an H100
	@$(RUN) -m pytest -q -m "gpu and not slow" --durations=10 $(ARGS)

soak: env  ## run the slow tests, which `make test` skips
	@$(PYTEST) -m slow $(ARGS)

mutants: env  ## check that the tests find each bug in tests/repository/mutants: 40 minutes
	@$(RUN) .ci/mutants $(ARGS)

lint: env  ## run ruff and mypy, and check the English with .ci/words
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check
	@$(RUN) -m mypy
	@test ! -f .ci/words || $(RUN) .ci/words  # a fork may delete it

size:  ## print the lines and decisions of each part of the program, and their limits; needs Python 3.9 or later
	@$(firstword $(PYTHON)) .ci/size

bench: env  ## benchmark the input pipeline and the training step
	@$(RUN) scripts/bench.py $(ARGS)

pictures: env  ## create the pictures in README.md and docs/ from two demo runs; needs Chromium
	@$(RUN) .ci/pictures

clean:  ## remove .venv and caches; keep runs/ and data/
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache
	@find . \( -path ./runs -o -path ./data \) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

lock: env  ## rewrite the lock files from requirements.txt and pyproject.toml's groups
	@.ci/lock $(ARGS)

address:  ## write a fork's URL=https://github.com/OWNER/NAME into the files that contain it
	@.ci/address '$(URL)'
