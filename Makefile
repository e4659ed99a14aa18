# One-command targets. Each installs what it needs into a virtual environment first: the active one, else .venv.
#   make train       install, then train a GPT with vocab-2 and lay its loss over the baseline's
#   make test        install, then run the tests (make test-long: the long ones too)
#   make lint        ruff and mypy
#   make bench       the runtime against stock Megatron
# Variables: PYTHON (3.11 to 3.13), VENV, TORCH, ARGS (of vocabpar train), PYTEST_ARGS.

PYTHON ?= python3
VENV ?= $(or $(VIRTUAL_ENV),.venv)
TORCH ?= torch==2.13.0
ARGS ?= --compare baseline --overwrite
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.vocabpar-installed

.PHONY: install train test test-long lint format bench clean

install: $(INSTALLED)-test $(INSTALLED)-lint

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and by version: the newest that the tests are run with, whatever the index offers.
$(INSTALLED)-%: pyproject.toml setup.py | $(BIN)/python
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[$*]"
	touch $@

train: $(INSTALLED)-train
	$(BIN)/vocabpar train $(ARGS)

test: $(INSTALLED)-test
	$(BIN)/python -m pytest -m "not long" $(PYTEST_ARGS)

test-long: $(INSTALLED)-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED)-test $(INSTALLED)-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)-train
	$(BIN)/vocabpar bench runtime

clean:
	rm -rf .venv .venv-ci build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
