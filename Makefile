# A new machine with Python >= 3.11 and make needs nothing else:
#
#     make demo     healthy and broken trainings, and what trainvet says about them
#     make test     every test, each framework in a process of its own
#
# Both share one environment in .venv, which is made on the first call (a few minutes) and kept. PYTHON=python3.12 chooses another Python.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# One thread per process: the programs are small, and results do not depend on the number of cores.
export OMP_NUM_THREADS ?= 1
export TF_CPP_MIN_LOG_LEVEL ?= 3
export KERAS_BACKEND := tensorflow

.PHONY: help install demo test detection lint format types imports package readme clean

help:
	@echo "make demo     healthy and broken trainings, and what trainvet says about them"
	@echo "make test     every test (make test GROUPS=\"core torch\" runs some: core, torch, keras, examples)"
	@echo "make detection   a few healthy and a few broken trainings: no false alarm, and the faults are found (3 minutes)"
	@echo "make lint     ruff: rules and formatting        make format   ruff: put both right"
	@echo "make types    mypy                              make imports  direction of imports"
	@echo "make package  wheel and sdist, installed and tried in an empty environment"
	@echo "make readme   the table of rules in the README, from the rules"
	@echo "make clean    remove the environment and what tools left behind"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trainvet needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": try make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@echo "installing into $(VENV): a few minutes the first time"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/trainvet demo lightning keras

test: $(STAMP)
	$(BIN)/python tests/groups.py $(GROUPS)

detection: $(STAMP)
	$(BIN)/python -m benchmarks.detection --quick

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports --no-logo

package: $(STAMP)
	$(BIN)/python tests/package.py

readme: $(STAMP)
	$(BIN)/python tests/readme.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist build
