# `make` lists the targets. Each installs what it needs first; when nothing has changed, that takes no time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
MODEL ?= cnn
# Processes that share the tests; most tests wait for processes of their own. Tests that measure the machine share a group.
TEST_JOBS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help setup train compare bench test test-all test-versions lint format tensorboard clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## make .venv and install what a run needs

train: $(VENV)/.installed ## train MNIST with two processes; options in ARGS="..."
	$(BIN)/python train.py strategy=ddp trainer.devices=2 $(ARGS)

compare: $(VENV)/.installed ## single, dp and ddp side by side, three repeats; MODEL=cnn_wide for more arithmetic
	$(BIN)/python train.py -m +experiment=dp_vs_ddp model=$(MODEL) $(ARGS)

bench: $(VENV)/.installed ## how fast this is, as ratios; half an hour or more; options in ARGS="--rows 1 3"
	$(BIN)/python benchmarks/bench.py $(ARGS)

test: lint ## ruff and all tests but the slow ones, at most 6 minutes; options for pytest in ARGS="..."
	$(PYTEST) -m "not slow" $(ARGS)

test-all: lint ## ruff and every test, at most 15 minutes; options for pytest in ARGS="..."
	$(PYTEST) $(ARGS)

test-versions: ## a few tests on the oldest and the newest versions that requirements.txt admits; downloads several GB
	tests/versions.sh

lint: $(VENV)/.installed-dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tensorboard: $(VENV)/.installed ## show every run in outputs/
	$(BIN)/tensorboard --logdir outputs

clean: ## remove virtual environments and caches; runs and data stay
	rm -rf $(VENV) .venv-versions .pytest_cache .ruff_cache src/*.egg-info

python_version = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)

$(VENV)/.installed: requirements.txt pyproject.toml
	$(if $(filter 3.11 3.12 3.13,$(python_version)),,$(error \
	  Lockstep needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is $(or $(python_version),not installed); \
	  choose one with make PYTHON=python3.13))
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	@touch $@
