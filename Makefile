# make demo   set up, then let a real model fix a real bug in a sandbox
# make test   set up, then run the tests
# make check  set up, then lint, types and tests
# make oracles  fetch kvpress and trl (1 MB each), with which the tests marked `oracle` compare
# make oracles-swebench  fetch the official harness of SWE-bench (490 MB) for those that are slow
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
JOBS ?= 2

.PHONY: demo test check lint setup oracles oracles-swebench clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

oracles: .oracles/.installed

.oracles/.installed: tests/cache/oracles.txt | setup
	rm -rf .oracles
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --target .oracles -r $<
	@touch $@

oracles-swebench: .oracles-swebench/.installed

.oracles-swebench/.installed: tests/tasks/oracles.txt
	$(PYTHON) -m venv --clear .oracles-swebench
	.oracles-swebench/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

demo: setup
	$(BIN)/agent run --task repo_issue $(ARGS)

test: setup
	$(BIN)/python -m pytest -m 'not slow' -n $(JOBS) --dist loadgroup $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
