# `make` lists the targets. Each installs what it needs first; when nothing has changed, that takes no time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
MODEL ?= cnn

.DEFAULT_GOAL := help
.PHONY: help setup train compare bench test lint format tensorboard clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(VENV)/.installed ## make .venv and install what a run needs

train: $(VENV)/.installed ## train MNIST with two processes; options in ARGS="..."
	$(BIN)/python train.py strategy=ddp trainer.devices=2 $(ARGS)

compare: $(VENV)/.installed ## single, dp and ddp side by side, three repeats; MODEL=cnn_wide for more arithmetic
	$(BIN)/python train.py -m +experiment=dp_vs_ddp model=$(MODEL) $(ARGS)

bench: $(VENV)/.installed ## how fast this is, as ratios; half an hour or more; options in ARGS="--rows 1 3"
	$(BIN)/python benchmarks/bench.py $(ARGS)

test: lint ## ruff and pytest; options for pytest in ARGS="..."
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed-dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tensorboard: $(VENV)/.installed ## show every run in outputs/
	$(BIN)/tensorboard --logdir outputs

clean: ## remove .venv and caches; runs and data stay
	rm -rf $(VENV) .pytest_cache .ruff_cache src/*.egg-info

$(VENV)/.installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; say make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	@touch $@
