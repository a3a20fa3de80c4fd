# The main commands are `make demo` and `make test`. Both first create the environment .venv. `make help` lists all.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

# Tests start Python hundreds of times. Without bytecode files, each start would compile the package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-quick test-ci test-all newest test-newest lint types format clean

setup: $(STAMP)  ## creates the environment .venv

help:  ## prints this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
	  || { echo "jaxddp needs Python 3.11 to 3.14; choose it with make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@echo "setting up .venv"
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv \
	  && $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt --editable '.[demo,dev,docs]' \
	  || { echo "uv failed; installing with pip, which takes a few minutes"; \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo,dev,docs]'; }
	@touch $@

demo: setup  ## trains a small ResNet on digits, in about a minute
	@rm -rf runs/demo
	@$(BIN)/jaxddp data sample digits --out data/digits
	$(BIN)/jaxddp train digits --data.path data/digits --workdir runs/demo --parallel.cpu-devices 4

# Markers (pyproject.toml) select three sets of tests. `test` covers every promise of README.md and every command once,
# `test-ci` has further tests for .ci/run, and `test-all` runs all tests. Tests that start processes spend two thirds of
# their time waiting, so there are more workers than cores. The longest files start first. Compiled programs are cached
# in ~/.cache/jaxddp-tests.
FILES := --dist loadfile --no-loadscope-reorder
POOL := -n 3 $(FILES)
# This folder has only tests for `test-ci`.
WITHOUT_CI := --ignore tests/benchmarks

test: setup  ## tests every feature and command, in seven minutes
	$(BIN)/python -m pytest $(POOL) -m "not ci and not exhaustive" $(WITHOUT_CI)

test-ci: setup  ## further tests, as .ci/run runs them
	$(BIN)/python -m pytest $(POOL) -m "ci and not exhaustive"

test-all: setup test-newest  ## all tests
	$(BIN)/python -m pytest $(POOL) --hypothesis-profile exhaustive

# `test-newest` runs the tests that depend on libraries, with the newest versions of the libraries on the newest Python.
# The environment .venv-newest is kept for a day.
NEWEST := $(patsubst %,tests/test_%.py,start private_names order loop api optimizers cost memory adapt xla_options tfds \
  manifest) tests/test_reproducible.py tests/integration/test_kept_programs.py \
  tests/test_step.py::test_gradients_equal_plain_grad \
  tests/integration/test_launch_train.py::test_two_processes_of_two_devices_equal_one_of_four

newest: setup  ## creates .venv-newest, with the newest Python and libraries
	@$(BIN)/python .ci/newest.py

test-newest: newest  ## the tests that depend on libraries, in .venv-newest
	.venv-newest/bin/python -m pytest -n 2 -m "not slow and not exhaustive" $(NEWEST)

# The tests of `test` without tests that start processes and without slow tests; the target is two minutes on two cores.
# These tests do not wait, so there is one worker for each core.
test-quick: setup  ## tests without processes, in two minutes
	$(BIN)/python -m pytest -n 2 $(FILES) -m "not slow and not processes and not ci and not exhaustive" $(WITHOUT_CI)

lint: setup  ## checks style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup  ## checks types
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: setup  ## corrects style and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Builds the wheel in dist/, without a network.
.PHONY: wheel
wheel: setup  ## builds the wheel in dist/
	$(BIN)/python -m hatchling build --target wheel --directory dist

# Writes the files of a release to dist/: the wheel, and the archive and the programs of each run of RUNS, which are
# finished runs. By default, the digits are trained.
RUNS ?= runs/resnet18_digits
.PHONY: release
release: $(filter runs/resnet18_digits,$(RUNS))  ## writes the files of a release to dist/
	@rm -rf dist
	@$(MAKE) --no-print-directory wheel
	$(BIN)/python .ci/release.py dist $(RUNS)

.PHONY: runs/resnet18_digits
runs/resnet18_digits: setup
	@$(BIN)/jaxddp data sample digits --out data/digits
	$(BIN)/jaxddp train digits --data data/digits --workdir runs/resnet18_digits --parallel.cpu-devices 4

clean:  ## removes environments, builds and the demo
	rm -rf .venv .venv-newest build dist runs/demo runs/resnet18_digits data/digits

# Builds the documentation site in build/site, without a network.
.PHONY: docs
docs: setup  ## builds the documentation site in build/site
	$(BIN)/python -m website.build

# Draws the picture in README.md by running the demo.
.PHONY: picture
picture: demo  ## draws the picture in README.md
	cp runs/demo/curves.png docs/curves.png
