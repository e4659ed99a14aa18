# One-command targets. Each installs what it needs into a virtual environment first: the active one, else .venv.
#   make train       install, train a GPT with vocab-2, lay its loss over the baseline's, and emulate 8 ranks
#   make test        install, then run the tests: one case of everything
#   make test-ci     further cases too: what finishes within 40 minutes on two cores (make test-long: all of them, within an hour)
#   make test-megatron-matrix   install every supported megatron-core wheel by itself, and run the integration tests on it
#   make test-megatron  with MEGATRON_LM_PATH=/path/to/Megatron-LM: its own pretrain_gpt.py on CPU processes, beside stock
#   make test-kernels   compile the Triton kernels for sm_80, sm_90 and sm_100 and interpret them, on every Triton in TRITONS
#   make test-machines   the README's commands and the tests on other Pythons, torches, processor settings and surroundings
#   make lint        ruff and mypy
#   make docs        the documentation as a site, in site/
#   make bench       the runtime against stock Megatron
#   make gpu         on a machine with GPUs, with the torch that it has: half an hour of checks and measurements, into a record in
#                    lab/results; again: what is left
#   make cuda-emulated  install torch's CUDA build by itself, and run training on emulated GPUs: faults that are found,
#                    methods and families against the CPU (tests/cuda_emulated/README.md); gigabytes, and an hour
# Variables: PYTHON (3.11 to 3.13), VENV, TORCH, GPU_PYTHON, MINUTES (of gpu), ARGS (of vocabpar train), EMULATE (of lab emulate), PYTEST_ARGS,
# MATRIX (versions of megatron-core), ROWS (words of test-machines), TRITONS (of torch 2.8, 2.11 and 2.13).

PYTHON ?= python3
VENV ?= $(or $(VIRTUAL_ENV),.venv)
TORCH ?= torch==2.13.0
ARGS ?= --compare baseline --overwrite
EMULATE ?= --microbatches 16 --scale 6 --report vocabpar-out
PYTEST_ARGS ?=
MATRIX ?= 0.14.0 0.15.3 0.16.1
TRITONS ?= 3.4.0 3.6.0 3.7.1

# Processes for two cores; a file in one of them, so that they share no ranks. Short tests wait in turns, for a
# process that they start or for a time that they measure, and leave room for a third one.
TWO := -n 2 --dist loadfile
THREE := -n 3 --dist loadfile
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# What pip compiles on one core, this compiles on all; and ours, for processes that write no compiled files.
COMPILE := $(BIN)/python -m compileall -q -j 0 $(VENV)/lib megatron_vocabpar tests > /dev/null || true
INSTALLED := $(VENV)/.vocabpar-installed
# Its Python alone, over whose compiled part tests put a stand-in; they are skipped without it.
TRANSFORMER_ENGINE ?= transformer_engine==2.11.0
PURE := --no-compile --no-deps --upgrade --target $(VENV)/transformer-engine

.PHONY: install train test test-ci test-long test-machines test-megatron test-megatron-matrix test-kernels cuda-emulated lint format docs bench gpu clean

install: $(INSTALLED)-test $(INSTALLED)-lint

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and by version: the newest that the tests are run with, whatever the index offers.
$(INSTALLED)-%: pyproject.toml setup.py | $(BIN)/python
	$(PIP) --no-compile "$(TORCH)"
	$(PIP) --no-compile --editable ".[$*]"
	$(if $(filter test,$*),$(PIP) $(PURE) "$(TRANSFORMER_ENGINE)" || echo "its tests will be skipped")
	$(COMPILE)
	touch $@

train: $(INSTALLED)-train
	$(BIN)/vocabpar train $(ARGS)
	$(BIN)/python -m lab emulate $(EMULATE)

test: $(INSTALLED)-test
	$(BIN)/python -m pytest $(THREE) -m "not slow and not long" $(PYTEST_ARGS)

test-ci: $(INSTALLED)-test
	$(BIN)/python -m pytest $(TWO) -m "not long" $(PYTEST_ARGS)

test-long: $(INSTALLED)-test
	$(BIN)/python -m pytest $(TWO) --hypothesis-profile long $(PYTEST_ARGS)

test-megatron: $(INSTALLED)-test
	MEGATRON_LM_PATH="$(MEGATRON_LM_PATH)" $(BIN)/python -m pytest $(TWO) tests/megatron_lm $(PYTEST_ARGS)

# Equality for p = 2 and 4, tied and untied; several chunks per rank; resumed training.
ON_EVERY_MEGATRON := tests/pipeline/test_equality.py tests/pipeline/test_families.py \
	tests/train/test_trainer.py -k "resumed or (test_any_placement and 2-2 and vocab) or \
	(test_same_training_as_stock and rope and (vocab-1-2-2 or vocab-2-2-2 or vocab-1-4-4 or vocab-2-4-4))"

test-megatron-matrix:
	@status=0; for version in $(MATRIX); do $(MAKE) .venv-matrix/$$version.log || status=1; done; \
	printf '\n| megatron-core | tests |\n| --- | --- |\n'; \
	for version in $(MATRIX); do printf '| %s | %s |\n' $$version "$$(tail -n 1 .venv-matrix/$$version.log)"; done; \
	exit $$status

.PHONY: $(MATRIX:%=.venv-matrix/%.log)
$(MATRIX:%=.venv-matrix/%.log): .venv-matrix/%.log: .venv-matrix/%/.installed
	.venv-matrix/$*/bin/python -m pytest -q $(ON_EVERY_MEGATRON) $(PYTEST_ARGS) > $@ 2>&1 || (tail -n 60 $@; exit 1)

.venv-matrix/%/.installed: pyproject.toml setup.py
	test -x .venv-matrix/$*/bin/python || $(PYTHON) -m venv .venv-matrix/$*
	.venv-matrix/$*/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	.venv-matrix/$*/bin/python -m pip install --quiet --disable-pip-version-check "megatron-core==$*" --editable ".[test]"
	touch $@

test-machines:
	$(PYTHON) scripts/machines.py $(ROWS)

# No GPU needed, and none used: a torch for the CPU beside a Triton that it does not ask for. The interpreter of
# Triton 3.4 makes numbers of arrays in a way that numpy 2.4 refuses.
test-kernels:
	@status=0; for version in $(TRITONS); do $(MAKE) .venv-kernels/$$version.log || status=1; done; \
	printf '\n| triton | tests |\n| --- | --- |\n'; \
	for version in $(TRITONS); do printf '| %s | %s |\n' $$version "$$(tail -n 1 .venv-kernels/$$version.log)"; done; \
	exit $$status

.PHONY: $(TRITONS:%=.venv-kernels/%.log)
$(TRITONS:%=.venv-kernels/%.log): .venv-kernels/%.log: .venv-kernels/%/.installed
	.venv-kernels/$*/bin/python -m pytest -q -W ignore tests/layers/test_triton_compiled.py \
		tests/layers/test_triton_interpreter.py $(PYTEST_ARGS) > $@ 2>&1 || (tail -n 60 $@; exit 1)

.venv-kernels/%/.installed: pyproject.toml
	test -x .venv-kernels/$*/bin/python || $(PYTHON) -m venv .venv-kernels/$*
	.venv-kernels/$*/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" \
		"numpy<2.4" pytest pytest-timeout hypothesis
	.venv-kernels/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "triton==$*"
	touch $@

lint: $(INSTALLED)-test $(INSTALLED)-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(BIN)/python
	$(PIP) --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "$(BIN)/mkdocs serve shows it, with its search"

bench: $(INSTALLED)-train
	$(BIN)/python -m lab runtime

# With the torch that is there, and without a network: nothing is taken from an index. Wheels that were carried to the
# machine in .whl/ (megatron-core, fastjsonschema) are unpacked beside it. Without a GPU its exit code is 2.
MINUTES ?= 30
GPU_PYTHON ?= $(or $(wildcard $(BIN)/python),$(PYTHON))
CARRIED := $(CURDIR)/.whl
gpu:
	@if ls "$(CARRIED)"/*.whl > /dev/null 2>&1; then $(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --upgrade \
		--target "$(CARRIED)/unpacked" "$(CARRIED)"/*.whl || exit 1; fi; \
	export PYTHONPATH="$(CURDIR):$(CARRIED)/unpacked$${PYTHONPATH:+:$$PYTHONPATH}"; \
	$(GPU_PYTHON) -m lab gpu --minutes $(MINUTES)

# No GPU needed, and none used: CUDA's libraries are replaced beneath torch.
EMULATED := .venv-cuda/bin/python tests/cuda_emulated/start.py
cuda-emulated:
	@mkdir -p .venv-cuda; $(MAKE) --silent .venv-cuda/.installed > .venv-cuda/install.log 2>&1 || \
	{ echo "torch's CUDA build cannot be had here, so nothing was run: see .venv-cuda/install.log"; exit 2; }
	.venv-cuda/bin/python tests/cuda_emulated/build.py
	@status=0; $(EMULATED) -m pytest tests/cuda_emulated $(PYTEST_ARGS) || status=1; \
	$(EMULATED) -m pytest -m gpu tests/layers tests/runtime || status=1; \
	for table in faults sweep commands; do $(EMULATED) -m tests.cuda_emulated.$$table || status=1; done; \
	exit $$status

.venv-cuda/.installed: pyproject.toml setup.py
	test -x .venv-cuda/bin/python || $(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		"torch==2.11.0" "triton==3.6.0" "megatron-core==0.16.1" "numpy<2.4" --editable ".[test]"
	.venv-cuda/bin/python -c "import sys, torch; sys.exit(torch.version.cuda is None)"
	touch $@

clean:
	rm -rf site .machines .venv .venv-ci .venv-matrix .venv-kernels .venv-cuda build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
