# Every target makes .venv and installs what it needs when that is missing, and costs nothing when it is not.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Another file here tests other versions: CI does so for PyTorch.
CONSTRAINTS ?= constraints.txt
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)

.DEFAULT_GOAL := help
.PHONY: help tour test test-book test-tools test-ranks test-trainers test-long test-all coverage lint format docs notebooks bench dist clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

tour: $(VENV)/.tour  ## run and verify everything, draw the figures, and write one page about it; QUICK=1 takes seconds
	@$(BIN)/kfs tour $(if $(QUICK),--quick)

PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test: $(VENV)/.dev  ## run all tests that notice an error in the library
	@$(PYTEST) --tier library --products covering

test-book: $(VENV)/.dev  ## build the book, and run the code of all pages
	@$(PYTEST) --tier book tests

test-tools: $(VENV)/.dev  ## test benchmarks, plots, reports, the tour, the wheel, Trainer and Lightning, and results that are stored
	@$(PYTEST) --tier tools tests

test-ranks: $(VENV)/.dev  ## test many processes and sharded models
	@$(PYTEST) --tier ranks tests

test-trainers: $(VENV)/.dev $(VENV)/.trainers  ## test TRL, adapters of PEFT, and quantized models
	@$(PYTEST) --tier trainers tests

test-long: $(VENV)/.dev  ## test all other combinations of parameters, and property-based tests with many examples
	@$(PYTEST) --tier library --products rest --hypothesis-profile long

test-all: test test-book test-tools test-ranks test-trainers test-long  ## run all tests

coverage: $(VENV)/.dev  ## run all tests, and say which lines and branches of kfs they do not run
	@$(PYTEST) --cov=kfs --cov-report=term-missing:skip-covered

lint: $(VENV)/.dev  ## check format, style, types and the layer rule
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(VENV)/.dev  ## format the code and apply the fixes of ruff
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(VENV)/.docs  ## build the book into docs/site
	@$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --jobs auto --quiet --conf-dir docs --doctree-dir docs/.doctrees . docs/site
	@$(BIN)/python -m docs.site_checks docs/site

notebooks: docs  ## run all notebooks of the book from top to bottom
	@$(BIN)/python -m docs.notebooks docs/site/docs

bench: .venv-bench/.peers  ## measure our products, factors, overhead, inverses and training, and our peers'
	@.venv-bench/bin/python -m benchmarks.products
	@.venv-bench/bin/python -m benchmarks.operators
	@.venv-bench/bin/python -m benchmarks.factors
	@.venv-bench/bin/python -m benchmarks.overhead
	@.venv-bench/bin/python -m benchmarks.recurrent
	@.venv-bench/bin/python -m benchmarks.algebra
	@.venv-bench/bin/python -m benchmarks.influence
	@.venv-bench/bin/python -m benchmarks.conformance
	@.venv-bench/bin/python -m benchmarks.other_libraries
	@.venv-bench/bin/python -m benchmarks.applications
	@.venv-bench/bin/python -m benchmarks.train
	@.venv-bench/bin/python -m benchmarks.long_runs
	@.venv-bench/bin/python -m benchmarks.distributed
	@.venv-bench/bin/python -m benchmarks.distributed_factors

dist: $(VENV)/.dev  ## build sdist and wheel into dist, check them, and run the tour from the wheel, elsewhere
	@rm -rf dist
	@$(BIN)/python -m hatchling build
	@$(BIN)/twine check --strict dist/*
	@PYTHON=$(abspath $(BIN)/python) .ci/try_wheel

clean:  ## remove .venv and everything that is built
	rm -rf $(VENV) .venv-bench dist docs/site docs/api docs/figures docs/.runs docs/.doctrees report .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kfs needs Python 3.11 or newer, but '$(PYTHON)' is older or missing. Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.dev $(VENV)/.docs $(VENV)/.tour $(VENV)/.trainers: $(VENV)/.%: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing kfs[$*] into $(VENV) (once; PyTorch is large) ..."
	@$(INSTALL) --editable '.[$*]'
	@touch $@

$(VENV)/.trainers: | $(VENV)/.dev

# An environment of its own: peers must not change what is tested. One that cannot be installed is reported, not fatal.
.venv-bench/.peers: pyproject.toml constraints.txt benchmarks/peers.txt
	@$(MAKE) --no-print-directory VENV=.venv-bench .venv-bench/bin/python
	@echo "Installing kfs[bench] and its peers into .venv-bench (once; PyTorch is large) ..."
	@.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	@grep -v '^#' benchmarks/peers.txt | while read -r peer; do \
	  .venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$$peer" \
	    || echo "$$peer could not be installed and is left out."; done
	@touch $@
