# The verbs of this project. `make demo` and `make test` set up what they need.

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.hasten-env
# This version has builds without CUDA, which is all that is needed; it is installed first and alone so that
# nothing else can choose another.
TORCH := torch==2.13.0
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
CPP_FILES := $(shell find hasten -name '*.cpp' -o -name '*.h' 2>/dev/null)
NATIVE := hasten/ops/_cpu/serving.so
SANITIZED := build/sanitized
SANITIZED_LEVELS := $(if $(filter x86_64 amd64,$(shell uname -m)),generic avx2,generic)
# Two processes with one thread each.
PYTEST_FLAGS ?= -n 2

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help env native demo test check check-native format bench clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

env: $(STAMP) ## create .venv with everything that hasten needs

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "hasten needs Python 3.11 or newer: none of python3.11, python3.12, python3.13 and" \
		"python3 is. Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { echo "could not create $(VENV): is the venv module installed" \
		"(on Debian and Ubuntu: apt install python3-venv)?" >&2; exit 1; }
	$(PY) -m pip install --quiet "setuptools>=77" wheel
	$(PY) -m pip install $(TORCH)
	$(PY) -m pip install --no-build-isolation -e ".[dev]"
	@touch $@

native: $(NATIVE) ## rebuild the native kernels after a change of their sources

$(NATIVE): setup.py $(CPP_FILES) | $(STAMP)
	$(PY) setup.py --quiet build_ext --inplace
	@test ! -e $@ || touch $@

demo: $(NATIVE) ## fine-tune a real model twice, plain and with hasten, and compare
	$(PY) -m hasten demo

test: $(NATIVE) ## the whole test suite
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_FLAGS)

check: $(STAMP) ## lint, format, types, import rules
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(if $(CPP_FILES),$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES))

# Python itself knows nothing of the sanitizers, so their libraries come first.
check-native: $(STAMP) ## the kernels under AddressSanitizer and UndefinedBehaviorSanitizer, on small cases
	HASTEN_SANITIZE=1 HASTEN_REQUIRE_NATIVE=1 HASTEN_LEVELS=$(subst $() $(),$(strip ,),$(SANITIZED_LEVELS)) \
		$(PY) setup.py --quiet build --build-lib $(SANITIZED) --build-temp $(SANITIZED)/objects
	set -e; for level in $(SANITIZED_LEVELS); do \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_WAIT_POLICY=passive \
		HASTEN_ISA=$$level PYTHONPATH=$(SANITIZED) \
		$(PY) tests/ops/level_suite.py --package $(SANITIZED)/hasten; done

format: $(STAMP) ## rewrite files in the project's format
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .
	$(if $(CPP_FILES),$(VENV)/bin/clang-format -i $(CPP_FILES))

bench: $(NATIVE) ## every contender on the real model, and every operator
	$(PY) -m hasten bench train --json runs/bench/train.json
	$(PY) -m hasten bench ops --json runs/bench/ops.json

clean: ## remove the environment, caches and results
	rm -rf $(VENV) runs build dist hasten/ops/_cpu/*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
