# Two commands do everything: `make demo` and `make test`. Each first makes .venv.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: setup demo test test-quick test-ci test-all newest test-newest lint types format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "jaxddp needs Python 3.11 to 3.13; say which: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@echo "setting up .venv"
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv \
	  && $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt --editable '.[demo,dev,docs]' \
	  || { echo "uv cannot; pip does it in a few minutes"; \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo,dev,docs]'; }
	@touch $@

demo: setup
	@rm -rf runs/demo
	@$(BIN)/jaxddp data sample digits --out data/digits
	$(BIN)/jaxddp train digits --data.path data/digits --workdir runs/demo --parallel.cpu-devices 4

# Tests are in three rings, by markers (pyproject.toml): `test` proves every promise and every command once, `test-ci` is
# what .ci/run adds, `test-all` leaves nothing out. Tests of processes wait for two thirds of their time, so more workers
# than cores share the files, the longest first. Programs that tests compile are kept in ~/.cache/jaxddp-tests.
FILES := --dist loadfile --no-loadscope-reorder
POOL := -n 3 $(FILES)

test: setup
	$(BIN)/python -m pytest $(POOL) -m "not ci and not exhaustive"

test-ci: setup
	$(BIN)/python -m pytest $(POOL) -m "ci and not exhaustive"

test-all: setup test-newest
	$(BIN)/python -m pytest $(POOL) --hypothesis-profile exhaustive

# What moves with the libraries, with the newest of them that pip resolves, on the newest Python: the environment
# .venv-newest, which is kept for a day.
NEWEST := $(patsubst %,tests/test_%.py,start private_names order loop api optimizers cost memory adapt xla_options tfds \
  manifest) tests/test_reproducible.py tests/integration/test_kept_programs.py \
  tests/test_step.py::test_gradients_equal_plain_grad \
  tests/integration/test_launch_train.py::test_two_processes_of_two_devices_are_one_of_four

newest: setup
	@$(BIN)/python .ci/newest.py

test-newest: newest
	.venv-newest/bin/python -m pytest -n 2 -m "not slow and not exhaustive" $(NEWEST)

# For every edit, in two minutes on two cores: of `test` all but the tests of processes and those marked slow.
# They wait for nothing, so there is a worker a core.
test-quick: setup
	$(BIN)/python -m pytest -n 2 $(FILES) -m "not slow and not processes and not ci and not exhaustive"

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .venv-newest build runs/demo data/digits

# The documentation site, in build/site; no address is asked for anything.
.PHONY: docs
docs: setup
	$(BIN)/python -m website.build

# The picture of README.md, from a run of its own.
.PHONY: picture
picture: demo
	cp runs/demo/curves.png docs/curves.png
