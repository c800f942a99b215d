# `make demo` and `make test` are all a fresh machine needs: make and Python 3.11 to 3.13; the rest is installed into .venv.

SHELL := /bin/sh
.SHELLFLAGS := -euc
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help env demo test quick soak lint bench clean lock
unexport PYTHONHOME PYTHONPATH

ARGS :=
PYTHON := python3 python3.13 python3.12 python3.11 python
LOCKS := requirements.lock requirements-dev.lock requirements-cuda.lock
RUN := .venv/bin/python
INSTALL := PIP_USER=0 $(RUN) -m pip install -qq --no-input --disable-pip-version-check --no-deps --require-hashes \
    --no-build-isolation --use-pep517

help:  ## this list
	@echo 'make <target> [ARGS="key=value ..."]'
	sed -n 's/^\([a-z]*\):[^#]*## /  \1\t/p' Makefile

# Up to date means: .venv/complete, written last, holds the checksum of the locks. Anything else (a changed lock, an
# interrupted install, a Python that has gone) is built again from nothing. flock, where there is one, keeps two makes apart.
# torch on Linux brings gigabytes of CUDA libraries, each locked in requirements-cuda.lock. A machine with no NVIDIA driver takes
# the CPU build of the same version where pip is set up to find it, and needs none of them. One dependency is published as source
# only; setuptools goes first, so that building it fetches nothing that is not locked.
env:  ## build .venv from the hashed locks; does nothing when they have not changed
	@exec 9<Makefile
	if command -v flock >/dev/null && ! flock --nonblock 9; then
	    echo 'make env: waiting for another make to finish'
	    flock 9 || true
	fi
	locks=$$(cat $(LOCKS) | cksum)
	if [ "$$(cat .venv/complete 2>/dev/null)" = "$$locks" ] && $(RUN) -c '' 2>/dev/null; then exit 0; fi
	python=
	for candidate in $(PYTHON); do
	    if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
	        python=$$candidate
	        break
	    fi
	done
	if [ -z "$$python" ]; then
	    echo 'make env: no Python 3.11, 3.12 or 3.13 found; install one (Debian, Ubuntu: apt install python3 python3-venv)' >&2
	    exit 1
	fi
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then
	    echo "make env: $$python has no venv or ensurepip; install them (Debian, Ubuntu: apt install python3-venv)" >&2
	    exit 1
	fi
	echo "make env: installing into .venv for $$("$$python" --version); once, a few minutes"
	"$$python" -m venv --clear .venv
	entry() { awk -v name="^$$1==" '$$0 ~ name { on = 1 } on { print } !/\\$$/ { on = 0 }' requirements.lock; }
	entry setuptools >.venv/build.lock
	$(INSTALL) -r .venv/build.lock
	if ! [ -e /proc/driver/nvidia/version ] && ! command -v nvidia-smi >/dev/null; then
	    entry torch | sed 's/^torch==[^ ]*/&+cpu/' >.venv/torch-cpu.lock
	    $(INSTALL) -r .venv/torch-cpu.lock 2>/dev/null || true
	fi
	$(INSTALL) -r requirements.lock
	$(INSTALL) -r requirements-dev.lock
	cuda=$$($(RUN) -c '
	from importlib.metadata import requires
	from packaging.requirements import Requirement
	needs = [r.name for r in map(Requirement, requires("torch")) if not r.marker or r.marker.evaluate({"extra": ""})]
	print(any(name.startswith(("cuda", "nvidia", "triton")) for name in needs))')
	if [ "$$cuda" = True ]; then
	    echo 'make env: this torch is built for CUDA; installing its libraries (2 GB to download)'
	    $(INSTALL) -r requirements-cuda.lock
	fi
	$(RUN) -m pip check
	if ! command -v cc >/dev/null && ! command -v gcc >/dev/null && ! command -v clang >/dev/null; then
	    echo 'make env: no C compiler found; with one (Debian, Ubuntu: apt install gcc), images decode a quarter faster'
	fi
	echo "$$locks" >.venv/complete

demo: env  ## train a small model on images that it draws itself
	@$(RUN) train.py recipe=demo $(ARGS)

test: env  ## the tests that take seconds each
	@$(RUN) -m pytest -q $(ARGS)

# A test file that can start a process or train imports one of these modules.
quick: env  ## the test files that start no process and do not train: under a minute
	@$(RUN) -m pytest -q $(ARGS) \
	    $$(grep -rLE '^(import|from) (subprocess|train|scripts|pipeline\.(build|feed|loader)|tests.*small_run)( |\.|$$)' \
	        tests --include='test_*.py')

soak: env  ## the tests that `make test` leaves out, to stay short
	@$(RUN) -m pytest -q -m slow $(ARGS)

lint: env  ## ruff and mypy
	@$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

bench: env  ## measure the input pipeline and the training step
	@$(RUN) scripts/bench.py $(ARGS)

clean:  ## remove .venv and caches; runs/ and data/ stay
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . \( -path ./runs -o -path ./data \) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# uv keeps the versions and hashes that the locks already hold; ARGS=--upgrade moves to the newest. The hashes of torch are
# all of its wheels of this version and, added by hand, that of the CPU-only build (+cpu) for Python 3.11.
lock:  ## rewrite the locks from requirements.txt and the dev group; needs uv
	@uv --version
	new=$$(mktemp -d)
	trap 'rm -r "$$new"' EXIT
	cat requirements.lock requirements-cuda.lock >"$$new/run"
	cp requirements-dev.lock "$$new/dev"
	compile() {
	    uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest --generate-hashes \
	        --no-header --no-annotate --output-file "$$@" $(ARGS) >/dev/null
	}
	printf '%s\n' simplejpeg nvidia-ml-py "cuda-toolkit[nvjpeg] ; sys_platform == 'linux'" | compile "$$new/run" requirements.txt -
	compile "$$new/dev" --group dev --constraint "$$new/run"
	sed -i '1i # Written by `make lock`. Install with: pip install --no-deps --require-hashes -r <this file>' "$$new"/*
	awk '/^#/ { print >"requirements.lock"; print >"requirements-cuda.lock"; next }
	    /^[a-z]/ { lock = /^(cuda|nvidia|triton)/ ? "requirements-cuda.lock" : "requirements.lock" }
	    { print >lock }' "$$new/run"
	cp "$$new/dev" requirements-dev.lock
