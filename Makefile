# make train                 train GPT-2 on this machine's GPU, or on its CPU
# make train ARGS="-x 100"   with flags for train_gpt2_fp32.py
# make test                  the tests; those that need a GPU are skipped where there is none
# make test-gpu              the tests on the GPU
# make bench                 time every kernel and the training step on the GPU, then write the docs' tables
# make doc-tables            write the docs' tables and plots anew from doc/benchmarks/*.json
# make lint

PYTHON ?= python3
ARGS ?=
BIN = .venv/bin

# What pip installs: the extra of pyproject.toml for the CUDA version that the driver speaks, none where there is no driver.
DRIVER := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
ifeq ($(DRIVER),)
TO_TRAIN = .
TO_TEST = .[dev]
else ifeq ($(DRIVER),12)
TO_TRAIN = .[cu12]
TO_TEST = .[test,cu12]
else
TO_TRAIN = .[cu13]
TO_TEST = .[test,cu13]
endif

.PHONY: train test test-gpu bench doc-tables lint

train: .venv/installed
	$(BIN)/python train_gpt2_fp32.py $(ARGS)

test: .venv/ready-to-test
	$(BIN)/python -m pytest $(ARGS)

test-gpu: .venv/ready-to-test
	$(BIN)/python -m pytest -m gpu -n 0 $(ARGS)

bench: .venv/ready-to-test
	$(BIN)/python -m kernels.bench $(ARGS)
	$(BIN)/python doc/fill_tables.py --plots

doc-tables: .venv/ready-to-test
	$(BIN)/python doc/fill_tables.py --plots

lint: .venv/ready-to-test
	$(BIN)/ruff check .

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --editable '$(TO_TRAIN)'
	touch $@

.venv/ready-to-test: .venv/installed
	$(BIN)/pip install --editable '$(TO_TEST)'
	touch $@
